"""The registry of parameter names and of the rows of fused parameters, for training, checkpoints and conversion.

* :mod:`~megatron.fsdp.naming.names`: a name taken apart, and the names that one parameter goes by.
* :mod:`~megatron.fsdp.naming.table`: the kinds of fused parameters, one row each.
* :mod:`~megatron.fsdp.naming.keys`: the keys of ``fsdp_dtensor`` checkpoints.

A *canonical* name is the name in a model without parallelism and without wrappers, with layers and experts counted over
the whole model: ``decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight``.
"""
