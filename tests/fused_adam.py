"""Mocks for the fused Adams of Transformer Engine and Apex, which run on CUDA only.

They work with the addresses of tensors, skip what follows an empty one, and make and keep state as the originals do.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Lists = list[list[torch.Tensor]]


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

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})

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


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's: moments of several dtypes, with scales next to the state, which is saved in float32."""

    def __init__(self, params: Any, **settings: Any) -> None:
        """With the keyword arguments that Megatron-Core gives it."""
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(params, {name: settings.pop(name, value) for name, value in defaults.items()})
        assert settings.pop("adam_w_mode", True) and not settings.pop("capturable", False)
        self.master_weights: bool = settings.pop("master_weights", False)
        self.use_decoupled_grad: bool = settings.pop("use_decoupled_grad", False)
        names = ("exp_avg", "exp_avg_sq")
        self.dtypes = {name: settings.pop(f"{name}_dtype", torch.float32) for name in names}
        assert settings.keys() <= {"master_weight_dtype", "store_param_remainders"}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.seen: set[torch.dtype] = set()

    def _initialize(self, parameter: torch.Tensor, name: str) -> None:
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        data = torch.zeros_like(local, dtype=self.dtypes[name])
        self.state[parameter][name] = self._wrapped(data, parameter)
        if self.dtypes[name] != torch.float32:
            self._scales.setdefault(parameter, {})[name] = torch.ones(1, device=parameter.device)

    @staticmethod
    def _wrapped(data: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return data
        mesh, shape = parameter.device_mesh, {"shape": parameter.size(), "stride": parameter.stride()}
        return DTensor.from_local(data, device_mesh=mesh, placements=parameter.placements, **shape)

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool = False) -> None:
        for name in self.dtypes:
            self._initialize(parameter, name)

    def _unscaled(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        value = self.state[parameter][name]
        value = value._local_tensor if isinstance(value, DTensor) else value
        assert value.dtype == self.dtypes[name]
        wide = value if value.dtype == torch.float32 else value.float()
        return wide.mul_(self._scales[parameter][name]) if value.dtype == torch.float16 else wide

    def _store(self, parameter: torch.Tensor, name: str, wide: torch.Tensor) -> None:
        value = self.state[parameter][name]
        value = value._local_tensor if isinstance(value, DTensor) else value
        if value.dtype == torch.float16:
            torch.div(wide.abs().max(), 2.0**15, out=self._scales[parameter][name].view(()))
            wide = wide / self._scales[parameter][name].clamp(min=1e-30)
        value.copy_(wide)

    def _keyed(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
        """The keys of a state dict, numbers or names, and the parameters."""
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        both = zip(keys, (p for group in self.param_groups for p in group["params"]), strict=True)
        return ((key, p) for key, p in both if key in state_dict["state"])

    def state_dict(self) -> dict[str, Any]:
        """With all moments in float32."""
        found = super().state_dict()
        for key, p in self._keyed(found):
            found["state"][key] = {name: self._wrapped(self._unscaled(p, name), p) for name in found["state"][key]}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From float32."""
        super().load_state_dict(state_dict)
        for key, p in self._keyed(state_dict):
            self.state[p] = {}
            for name, value in state_dict["state"][key].items():
                self._initialize(p, name)
                local = value._local_tensor if isinstance(value, DTensor) else value
                if local.numel():
                    self._store(p, name, local.float())

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
                moments = [self._unscaled(p, name) for name in self.dtypes]
                for name, dtype in self.dtypes.items():
                    if dtype != torch.float32:
                        narrow.append((p, name, moments[list(self.dtypes).index(name)], self._scales[p][name]))
                self.seen.add(grad.dtype)
                for where, value in zip(lists, (grad.data, p.data, *moments), strict=True):
                    where.append(value._local_tensor if isinstance(value, DTensor) else value)
            _update(lists, group)
            for p, name, wide, _ in narrow:
                self._store(p, name, wide)


for _class, _name in ((FusedAdam, "transformer_engine.pytorch"), (ApexAdam, "apex")):
    _class.__module__, _class.__qualname__ = f"{_name}.optimizers.fused_adam", "FusedAdam"
