"""What functions do with the features of a value, by their names."""

from __future__ import annotations

from torch import nn

from .source import words

__all__ = ["ABOUT", "ACTIVATIONS", "CUTS", "MAKES", "MIXES", "NUMBERS", "REDUCES", "RESHAPES"]

CUTS = words("chunk split tensor_split unbind narrow split_with_sizes")
REDUCES = words(
    """
    mean std var sum softmax log_softmax norm max min amax amin argmax argmin topk sort argsort cumsum cumprod
    logsumexp prod median quantile normalize layer_norm rms_norm group_norm kthvalue std_mean var_mean
    vector_norm softmin gumbel_softmax logcumsumexp cummax cummin nansum nanmean nanmedian aminmax renorm
    count_nonzero any all diff unique histc cosine_similarity pairwise_distance cdist corrcoef cov
    """
)
MIXES = words(
    """
    glu flip fliplr flipud roll rot90 gather scatter index_select take take_along_dim masked_select unfold
    fold cat concat concatenate hstack column_stack bmm matmul mm mv dot inner vdot einsum tensordot outer
    baddbmm addmm addbmm linear bilinear cross kron pad conv1d conv2d conv3d multi_head_attention_forward
    scaled_dot_product_attention interpolate pixel_shuffle pixel_unshuffle channel_shuffle
    """
)
"""Functions that take some features to the places of others, or multiply them with others."""
RESHAPES = words(
    "view reshape unflatten transpose permute swapaxes view_as movedim moveaxis swapdims rearrange"
)
ABOUT = words("shape dtype device size dim ndim numel nelement is_cuda requires_grad type")
MAKES = words("new_empty new_zeros new_ones new_full new_tensor")
"""Methods that make something of the sizes that they are given, whatever those of the value itself."""
NUMBERS = words("float int abs min max round pow sqrt isqrt rsqrt log log2 log10 exp ceil floor prod tensor")
"""Functions that make a number of a number."""

ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Hardswish,
    nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
    nn.LogSigmoid, nn.Sigmoid, nn.Tanh, nn.Identity,
)  # fmt: skip
"""Modules that take each element by itself."""
