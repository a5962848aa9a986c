"""What rollout backends share; a new engine needs an `Engine`, a load session and its settings.

Adapter's side: `adapter` (feeds one engine rank), `lease_source`, `bucket_sender`, `buffers`.
Server's side: `replica` and `server` (life cycle), `weight_updates` (receive, load on all ranks,
commit or fence), `update_rendezvous`, `pauses`, `engine_memory`, `gated_app` (HTTP).
Engine's side, in every rank's process: `weight_loading` (one update), `bucket_receiver`,
`weights_directory`, `weight_checks`, `copy_ledger`, `zero_pages`, `process_watch`.
Between them: `protocol`, all of it msgpack; `engine` says what a server needs of its engine.

The engine's side and the adapter's need torch: install `rl-core[torch]`. Nothing is imported here.
"""
