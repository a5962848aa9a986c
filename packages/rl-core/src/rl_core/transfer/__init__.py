"""What checkpoint engines that stream buckets share; a new transport needs `transport` only.

Layers, bottom up: `plan` (which bytes go into which bucket, pure), `messages` (what the two sides
say), `control` (one control connection), `peers` and `link` (the sender's and a receiver's end),
`packing` and `unpacking` (tensors to buckets and back), `transport` (what moves the bytes),
`sending` and `reception` (one version under way), `engine` (the `CheckpointEngine` around it).

`packing`, `unpacking`, `buffers` and what imports them need torch: install `rl-core[torch]`.
Nothing is imported here.
"""
