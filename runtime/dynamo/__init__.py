"""Calls inside torch.compile, torch.export and make_fx: operators with fake, autograd and vmap implementations."""
