"""Mocks for the fused Adams of Transformer Engine and Apex, which run on CUDA only.

They work with the addresses of tensors, skip what follows an empty one, and make and keep state as the originals do.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Lists = list[list[torch.Tensor]]
_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def _update(lists: Lists, group: dict[str, Any]) -> None:
    """The kernels: gradients, weights and both moments, by address."""
    (beta1, beta2), step = group["betas"], group["step"]
    for grad, weight, first, second in zip(*lists, strict=True):
        if not grad.numel():
            return
        assert all(tensor.data_ptr() for tensor in (grad, weight, first, second)), "a kernel reads at address 0"
        assert all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in (grad, weight, first, second))
        grad = grad.to(weight.dtype)
        mean, square = first.to(weight.dtype), second.to(weight.dtype)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        first.copy_(mean)
        second.copy_(square)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))


class ApexAdam(torch.optim.Optimizer):
    """State by ``zeros_like``, and everything as it is given to kernels."""

    def __init__(self, params: Any, **settings: Any) -> None:
        """With the keyword arguments that Megatron-Core gives it."""
        super().__init__(params, _DEFAULTS | settings)
        assert self.defaults.pop("adam_w_mode", True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: Lists = [[], [], [], []]
            for p in group["params"]:
                if p.grad is None:
                    continue
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in self.state[p]:
                        self.state[p][name] = torch.zeros_like(p.data)
                for where, value in zip(lists, (p.grad.data, p.data, *self.state[p].values()), strict=True):
                    where.append(value)
            _update(lists, group)


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


class Float8(torch.Tensor):
    """A moment in FP8: it appears as float32, and has its bytes and scale in fields."""

    bytes: torch.Tensor
    scale: torch.Tensor

    def __new__(cls, data: torch.Tensor) -> "Float8":
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)

    def __init__(self, data: torch.Tensor) -> None:
        self.bytes, self.scale = data, torch.ones(1, device=data.device)

    def quantize(self, wide: torch.Tensor, scale: torch.Tensor) -> None:
        narrow = wide * torch.where(scale > 0, scale.reciprocal(), 0.0)
        self.scale.copy_(scale)
        self.bytes.copy_(narrow.to(torch.float8_e4m3fn).view(torch.uint8))

    def float(self) -> torch.Tensor:  # type: ignore[override]
        return self.bytes.view(torch.float8_e4m3fn).float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        assert not function._schema.is_mutable, f"{function} of a moment in FP8"
        wide = [value.float() if isinstance(value, Float8) else value for value in args]
        return function(*wide, **(kwargs or {}))


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's: moments of several dtypes, with scales next to the state, which is saved in float32."""

    def __init__(self, params: Any, **settings: Any) -> None:
        """With the keyword arguments that Megatron-Core gives it."""
        super().__init__(params, {name: settings.pop(name, value) for name, value in _DEFAULTS.items()})
        assert settings.pop("adam_w_mode", True) and not settings.pop("capturable", False)
        self.master_weights: bool = settings.pop("master_weights", False)
        self.use_decoupled_grad: bool = settings.pop("use_decoupled_grad", False)
        names = ("exp_avg", "exp_avg_sq")
        self.name_to_dtype_map = {name: settings.pop(f"{name}_dtype", torch.float32) for name in names}
        assert settings.keys() <= {"master_weight_dtype", "store_param_remainders"}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.seen: set[torch.dtype] = set()

    def _initialize(self, parameter: torch.Tensor, name: str) -> None:
        dtype = self.name_to_dtype_map[name]
        data = torch.zeros_like(_local(parameter), dtype=dtype)
        self.state[parameter][name] = self._wrapped(Float8(data) if dtype == torch.uint8 else data, parameter)
        if dtype != torch.float32:
            self._scales.setdefault(parameter, {})[name] = torch.ones(1, device=parameter.device)

    @staticmethod
    def _wrapped(data: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return data
        mesh, shape = parameter.device_mesh, {"shape": parameter.size(), "stride": parameter.stride()}
        return DTensor.from_local(data, device_mesh=mesh, placements=parameter.placements, **shape)

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool = False) -> None:
        for name in self.name_to_dtype_map:
            self._initialize(parameter, name)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        value, dtype = _local(self.state[parameter][name]), self.name_to_dtype_map[name]
        if dtype == torch.uint8:
            return value.float()  # whatever kind of tensor it is
        assert value.dtype == dtype
        wide = value if dtype == torch.float32 else value.float()
        return wide.mul_(self._scales[parameter][name]) if dtype == torch.float16 else wide

    def set_scaled_state(self, parameter: torch.Tensor, name: str, wide: torch.Tensor) -> None:
        assert wide.dtype == torch.float32
        if name not in self.state[parameter]:
            self._initialize(parameter, name)
        value = _local(self.state[parameter][name])
        if self.name_to_dtype_map[name] == torch.float32:
            value.copy_(wide)
        else:
            self._apply_scale(name, wide, value, self._scales[parameter][name])

    def _apply_scale(self, name: str, wide: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> None:
        if value.dtype == torch.bfloat16:
            value.copy_(wide)
            return
        least, most = torch.aminmax(wide)
        is_fp8 = self.name_to_dtype_map[name] == torch.uint8
        torch.div(torch.maximum(-least, most), 448.0 if is_fp8 else 2.0**15, out=scale.view(()))
        if is_fp8:
            assert isinstance(value, Float8)
            value.quantize(wide, scale)
        else:
            value.copy_(wide.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0)))

    def _keyed(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
        """The keys of a state dict, numbers or names, and the parameters."""
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        both = zip(keys, (p for group in self.param_groups for p in group["params"]), strict=True)
        return ((key, p) for key, p in both if key in state_dict["state"])

    def state_dict(self) -> dict[str, Any]:
        """With all moments in float32."""
        found = super().state_dict()
        for key, p in self._keyed(found):
            found["state"][key] = {
                name: self._wrapped(self.get_unscaled_state(p, name), p) for name in found["state"][key]
            }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From float32."""
        super().load_state_dict(state_dict)
        for key, p in self._keyed(state_dict):
            self.state[p] = {}
            for name, value in state_dict["state"][key].items():
                self.set_scaled_state(p, name, _local(value).float())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert not self.master_weights, "FSDP has main weights"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: Lists = [[], [], [], []]
            narrow = []
            for p in group["params"]:
                grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                if not self.state[p]:
                    self.initialize_state(p)
                if grad is None:
                    continue
                moments = [self.get_unscaled_state(p, name) for name in self.name_to_dtype_map]
                for (name, dtype), wide in zip(self.name_to_dtype_map.items(), moments, strict=True):
                    if dtype != torch.float32:
                        narrow.append((name, wide, _local(self.state[p][name]), self._scales[p][name]))
                self.seen.add(grad.dtype)
                for where, value in zip(lists, (grad.data, p.data, *moments), strict=True):
                    where.append(_local(value))
            _update(lists, group)
            for each in narrow:
                self._apply_scale(*each)


for _class, _name in ((FusedAdam, "transformer_engine.pytorch"), (ApexAdam, "apex")):
    _class.__module__, _class.__qualname__ = f"{_name}.optimizers.fused_adam", "FusedAdam"
