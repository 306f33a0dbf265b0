"""Serving: a source engine publishes the caches of its prompts, a target engine maps them and goes on.

* `keys`: what a cache of a token prefix is found by.
* `store`: where caches lie between engines: one small interface, and a shared folder behind it.
* `manifest`, `parts`, `index`: what a published cache consists of, and how the longest prefix is found.
* `asking`: what a request asks for; `outcome`: what it is answered.
* `compatibility`: whether a mapper, a published cache and an engine belong together.
* `engine`: starts an engine; `vllm`: the connector within it.
* `gateway`, `bench`: in front of engines.

Importing this package, or any module named above but the last two, imports neither vLLM nor a web framework.
"""
