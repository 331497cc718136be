"""The main job: reinforcement learning of a small MoE language model, balanced, on any laptop."""
