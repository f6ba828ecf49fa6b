"""What a call would return, cost and change, found on fake tensors."""
