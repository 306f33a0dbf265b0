"""Models: which they are, the shape and rotation of their KV, and running them from tokens or a cache.

`pair` loads two models, `capture` runs them, `cache` is the KV value that passes between rooms, `rope` takes
rotations off and puts them on, `geometry` and `families` say which models can be used, `verify` checks that
it is so.
"""
