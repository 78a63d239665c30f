"""Programs of torch.export that call compiled Functions."""
