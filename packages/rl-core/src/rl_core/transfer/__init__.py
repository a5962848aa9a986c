"""What checkpoint engines share; a new transport needs `transport` only, or `mover`.

Layers, bottom up: `plan` (which bytes go into which bucket, pure), `messages` (what the two sides
say), `control` (one control connection), `peers` and `link` (the sender's and a receiver's end),
`packing` and `unpacking` (tensors to buckets and back), `transport` (what moves the bytes),
`sending` and `reception` (one version under way), `engine` (the `CheckpointEngine` of them).

The group, the order of calls, versions and errors are in `group_engine`, which knows of no buckets:
an engine that moves weights in another way than bucket by bucket (as files, say) implements
`mover`, with `lending` for its receiver's leases.

`packing`, `unpacking`, `buffers` and what imports them need torch: install `rl-core[torch]`.
Nothing is imported here.
"""
