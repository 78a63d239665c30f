"""A Function class to graphs: captured at the dispatcher on fake tensors, then lowered from ATen."""
