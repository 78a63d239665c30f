"""The rules of a specialisation under torch.func: forward, setup_context, backward, jvp and vmap, at every level."""
