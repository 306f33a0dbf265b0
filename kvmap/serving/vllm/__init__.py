"""vLLM's side of serving: the connector, and the middleware that tells clients of streams what became of it.

`connector` is what vLLM loads. `scheduler_side` decides, `worker_side` reads and writes pages; between them
go the messages of `messages`. Only modules of this package import vLLM.
"""
