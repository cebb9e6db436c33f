"""A hybrid model of Mamba-2, gated delta network, attention, MLP and expert layers, without Transformer Engine or CUDA.

The specification ``stack`` is for Megatron's ``--spec tests.hybrid_models stack``. Importing this module gives Megatron
references in plain torch in place of the kernels of mamba-ssm and flash-linear-attention.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fsdp.mcore import cpu

cpu.enable()

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.models.hybrid import hybrid_block  # noqa: E402
from megatron.core.ssm import mamba_mixer  # noqa: E402
from megatron.core.ssm.gated_delta_net import common, gdn  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mlp_layer import MLPLayer  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_layer import (  # noqa: E402
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)


def scan(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    **unused: Any,
) -> torch.Tensor:
    """The causal convolution and the scan of Mamba-2 (https://arxiv.org/abs/2405.21060), in its quadratic form.

    Args:
        projected: Gate z, inputs x, B and C, and step sizes dt, side by side: [batch, length, width].
        conv_weight: [channels of x, B and C, taps].
        conv_bias: [channels].
        dt_bias: [heads].
        A: Rates of decay, [heads].
        D: Weights of the inputs in the outputs, [heads].
        headdim: Channels of a head.
        ngroups: Groups of heads, which share B and C.
        unused: Settings of the kernel.

    Returns:
        The gated outputs: [batch, length, heads * headdim].
    """
    length, heads = projected.shape[1], len(A)
    channels, taps = conv_weight.shape
    z, mixed, dt = projected.split([heads * headdim, channels, heads], dim=-1)
    mixed = F.conv1d(mixed.mT, conv_weight.unsqueeze(1), conv_bias, padding=taps - 1, groups=channels)[..., :length].mT
    states = (channels - heads * headdim) // 2
    x, B, C = F.silu(mixed).split([heads * headdim, states, states], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    dt = F.softplus(dt + dt_bias)
    decay = (dt * A).cumsum(1)
    decay = decay.unsqueeze(2) - decay.unsqueeze(1)
    later = torch.ones(length, length).triu(1).bool().view(1, length, length, 1)
    weights = decay.masked_fill(later, -torch.inf).exp()
    alike = torch.einsum("blgn,bsgn->blsg", C.unflatten(-1, (ngroups, -1)), B.unflatten(-1, (ngroups, -1)))
    weights = weights * alike.repeat_interleave(heads // ngroups, dim=-1)
    y = torch.einsum("blsh,bsh,bshp->blhp", weights, dt, x) + D.unsqueeze(-1) * x
    return y.flatten(2) * F.silu(z)


class GroupNorm(nn.Module):
    """RMS norm of each group of channels."""

    def __init__(self, width: int, eps: float, group_size: int, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps, self._group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self._group_size))
        return F.rms_norm(groups, (self._group_size,), eps=self._eps).flatten(-2) * self.weight


def convolution(x: torch.Tensor, weight: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
    """The causal convolution of gated delta networks: x is [batch, length, channels], weight [channels, taps]."""
    channels, taps = weight.shape
    mixed = F.conv1d(x.mT, weight.unsqueeze(1), padding=taps - 1, groups=channels)[..., : x.shape[1]]
    return F.silu(mixed).mT, None


mamba_mixer.HAVE_MAMBA_SSM = True
mamba_mixer.ExtendedRMSNorm = GroupNorm
mamba_mixer.mamba_split_conv1d_scan_combined = scan
hybrid_block.TENorm = WrappedTorchNorm
common.HAVE_FLA = True
common.l2norm = lambda x: F.normalize(x, dim=-1)
gdn.causal_conv1d = convolution
gdn.chunk_gated_delta_rule = gdn.torch_chunk_gated_delta_rule


def _layer(module: type, **submodules: Any) -> ModuleSpec:
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**submodules))


def _mixing(attention: ModuleSpec) -> ModuleSpec:
    return _layer(
        TransformerLayer,
        input_layernorm=WrappedTorchNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
    )


_MLP = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
_PREDICTION = MultiTokenPredictionLayerSubmodules(
    enorm=WrappedTorchNorm,
    hnorm=WrappedTorchNorm,
    eh_proj=ColumnParallelLinear,
    mtp_model_layer=None,
    layer_norm=WrappedTorchNorm,
)

stack = ModuleSpec(
    module=hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(
                    module=mamba_mixer.MambaMixer,
                    submodules=mamba_mixer.MambaMixerSubmodules(
                        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                    ),
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        gdn_layer=_mixing(
            ModuleSpec(
                module=gdn.GatedDeltaNet,
                submodules=common.GatedDeltaNetSubmodules(
                    in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
                ),
            )
        ),
        attention_layer=_mixing(
            ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
                ),
            )
        ),
        mlp_layer=_layer(
            MLPLayer,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=functools.partial(MLP.as_mlp_submodule, submodules=_MLP),
            mlp_bda=get_bias_dropout_add,
        ),
        moe_layer=_layer(
            MoETransformerLayer,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
            mlp_bda=get_bias_dropout_add,
        ),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=_PREDICTION)]
            ),
        ),
    ),
)
