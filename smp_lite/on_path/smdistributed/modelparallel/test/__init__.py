from . import torch

__all__ = ["torch"]
