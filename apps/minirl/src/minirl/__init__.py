"""A complete RL loop on Ray that proves which weights the rollout engine serves."""
