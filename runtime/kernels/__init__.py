"""One Triton kernel: its module loaded, proved in bounds, launched, interpreted or tuned."""
