"""A traced function under torch.func: its vjp, jvp and batched forms, each derived lazily."""
