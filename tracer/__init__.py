"""A Function class to graphs: traced at the dispatcher on fake tensors, then lowered from ATen."""
