"""Programs that once did not give the same answer, reduced, and known defects. A test runs them all."""

from tests.fuzz.network import Features
from tests.fuzz.program import Program, step
from tests.fuzz.settings import Setting

FOUND: dict[str, Program] = {
    # torch loses an assignment to .data of its own DTensors, also of those that are not sharded yet.
    "assigned_before_sharding": Program(
        Setting(ranks=4, mesh="tp", interface="fsdp2", strategy=2, units="whole", replicated=True),
        [step("write", how="data", what="block"), step("kept_weight")],
    ),
    # Attention reads the weights of its output layer, which was a unit: a gather that other ranks did not do.
    "attention_in_fine_units": Program(
        Setting(strategy=0, units="fine", features=Features(extra="attention")),
        [step("apart", orders=((0, 1), ())), step("backward", sync=True)],
    ),
    # A block that is called again after the forward is the last of its plan; a rank that skips it did not reshard it.
    "block_after_its_model": Program(
        Setting(units="nested", overlap=False),
        [
            step("auxiliary", index=1, together=True),
            step("part"),
            step("backward"),
            step("apart", orders=((0, 1), ())),
        ],
    ),
    # A backward of what a hook has captured in a unit.
    "captured_loss": Program(Setting(), [step("captured", index=0, after="nothing")]),
    # The first backward is one of a captured loss, which has an order of its own; then ranks run other blocks.
    "captured_loss_first": Program(
        Setting(interface="fsdp2"),
        [
            step("captured", index=0, after="nothing"),
            step("apart", orders=((0,), (1,))),
            step("backward"),
            step("optimize"),
        ],
    ),
    # A step with a closure, while no backward synchronizes gradients.
    "closure_without_sync": Program(Setting(sync_each=False), [step("closure")]),
    # Wrong: parameters got back their .data after an evaluation with an average, and had the average's values.
    "data_from_before": Program(
        Setting(), [step("average"), step("backward"), step("optimize"), step("average", use="data"), step("forward")]
    ),
    # p.data = x with ZeRO-0.
    "data_of_zero_0": Program(Setting(strategy=0), [step("write", how="data"), step("forward")]),
    # Ranks run other blocks with ZeRO-2 and a double buffer: weights that stay unsharded take nobody's buffer.
    "double_buffer_of_resident_weights": Program(
        Setting(ranks=3, strategy=2, units="fine", double_buffer=True, overlap=False),
        [
            step("both_models", detach=False, sync=True),
            step("optimize"),
            step("apart", orders=((0,), (1,))),
            step("backward", sync=False, retain=False),
        ],
    ),
    # A unit whose inputs need no gradients is used again before a later block, and shares its buffer.
    "embedding_between_blocks": Program(
        Setting(double_buffer=True, features=Features(embedded=True)),
        [
            *(
                one
                for _ in range(2)
                for one in (step("forward"), step("backward"), step("optimize"), step("zero_grad"))
            ),
            step("forward", order=(1, 0)),
            step("backward"),
        ],
    ),
    # Ranks run other blocks, behind an embedding that a plan gathers twice: a rank that skips a block gathers it once.
    "embedding_between_blocks_of_each_rank": Program(
        Setting(features=Features(embedded=True)),
        [
            step("both_models", detach=False, sync=False),
            step("apart", orders=((0, 1), (1, 0))),
            step("backward", sync=False, retain=True),
        ],
    ),
    # The plan unshards an embedding before the first block. A rank without the second block reads it afterwards.
    "embedding_of_one_block": Program(
        Setting(features=Features(embedded=True)),
        [step("optimize"), step("forward"), step("backward"), step("apart", orders=((0,), (1,))), step("backward")],
    ),
    # The model is evaluated between a forward and its backward, and some ranks have run fewer blocks.
    "evaluation_before_backward": Program(
        Setting(interface="fsdp2", strategy=2),
        [step("apart", orders=((0, 1), ())), step("forward", mode="no_grad"), step("backward")],
    ),
    # The first forward of the FSDP2 interface runs in inference mode.
    "first_forward_in_inference_mode": Program(
        Setting(interface="fsdp2"), [step("forward", mode="inference"), step("backward")]
    ),
    # A backward inside a forward that follows a write: all units are reset when the forward begins.
    "forces_after_a_write": Program(
        Setting(features=Features(forces="graph")),
        [
            step("accumulate", count=2),
            step("freeze", what="all", frozen=True),
            step("write", how="copy_", what="all"),
            step("forward"),
        ],
    ),
    # Forces in the forward, of recomputed layers.
    "forces_in_forward": Program(
        Setting(units="fine", features=Features(checkpoint="inside", forces="graph")),
        [step("backward"), step("optimize"), step("forward")],
    ),
    # A weight that is read outside of its unit is frozen before backward.
    "frozen_after_it_was_read": Program(
        Setting(strategy=0, units="none"), [step("part", index=1), step("freeze", what="up"), step("backward")]
    ),
    # Recomputed values of a frozen model with tied blocks are said to have different metadata.
    "frozen_and_tied_in_a_checkpoint": Program(
        Setting(replicated=True, features=Features(tied="blocks", checkpoint="around", forces="graph")),
        [step("freeze", what="all", frozen=True), step("auxiliary", index=0, together=False)],
    ),
    # A frozen model of one unit recomputes blocks for a loss that one of them keeps.
    "frozen_root_in_a_checkpoint": Program(
        Setting(units="none", features=Features(checkpoint="around")),
        [step("freeze", what="all", frozen=True), step("auxiliary", index=0, together=False)],
    ),
    # A weight that is full on every rank took its new values from a sharded one on the rows of that one's shard only.
    "full_teacher_of_a_sharded_student": Program(
        Setting(strategy=0),
        [step("other_model"), step("resume", strategy=3, units="block", kind="full"), step("teach", how="lerp_")],
    ),
    # A backward of some blocks, whose ranks differ, gathers again what another has resharded; units run in a different
    # order
    # than they are registered in, and the first forward was another one.
    "gathered_for_a_backward_out_of_the_registered_order": Program(
        Setting(interface="fsdp2", strategy=2, units="fine", features=Features(extra="recurrent")),
        [step("apart", orders=((0,), (1,))), step("hooked", kind="module"), step("backward", sync=True, retain=False)],
    ),
    # A load dropped state from before the first step on ranks that held elements of it, and gathered it on the others.
    "initial_momentum_in_another_layout": Program(
        Setting(strategy=2, granularity="tensor", optimizer="momentum"),
        [step("resume", strategy=0, units="none", kind="shards"), step("forward"), step("backward"), step("optimize")],
    ),
    # Ranks with elements dropped loaded state from before the first step, which a frozen weight does not get again.
    "initial_momentum_of_a_frozen_weight": Program(
        Setting(ranks=3, units="whole", optimizer="momentum", features=Features(tied="root")),
        [
            step("resume", strategy=2, units="whole", kind="shards"),
            step("freeze", what="head", frozen=True),
            step("resume", strategy=0, units="block", kind="full"),
        ],
    ),
    # After Ctrl-C in a forward, model.zero_grad() kept the gradients of the main weights.
    "interrupted_forward": Program(
        Setting(interface="fsdp2"),
        [
            step("backward", sync=True, retain=False),
            step("fail", where="forward", interrupt=True, direct=False),
            step("zero_grad", who="model", to_none=True),
        ],
    ),
    # Wrong: gloo's maximum drops NaN, so that an infinity norm of NaN on one rank was a number.
    "largest_of_nan": Program(
        Setting(groups="part", features=Features(tied="blocks")),
        [step("scaled", overflow="all"), step("clip", kind="inf")],
    ),
    # A backward of a loss from before load_state_dict, which has to raise.
    "load_before_backward": Program(Setting(strategy=2), [step("forward"), step("load"), step("backward")]),
    # The forward of the model writes weights of a block that runs later.
    "momentum_in_forward": Program(
        Setting(features=Features(forces="detached")),
        [step("write_in_forward", how="data ="), step("backward"), step("optimize"), step("forward")],
    ),
    # set_reshard_after_forward left a plan of the backward without the weights that it gathers now.
    "no_longer_kept": Program(
        Setting(interface="fsdp2", strategy=2),
        [
            step("apart", orders=((0, 1), (0,))),
            step("accumulate", count=1),
            step("method", name="reduce"),
            step("accumulate", count=1),
            step("backward"),
        ],
    ),
    # set_reshard_after_forward took away the group of neighbours from tasks of a failed backward that still used it.
    "neighbours_are_left_at_once": Program(
        Setting(ranks=4, interface="fsdp2", within=True),
        [
            step("fail", where="backward", direct=True),
            step("method", name="reduce"),
            step("fail", where="forward", interrupt=True, direct=True),
        ],
    ),
    # Units inside others, with a double buffer: the next unit takes the outer one's buffer only once that has ended.
    "nested_units_that_share_a_buffer": Program(
        Setting(ranks=3, units="fine", double_buffer=True),
        [step("apart", orders=((0, 1), (0,))), step("backward", sync=False, retain=False)],
    ),
    # Parameters listed before sharding are clipped, read and written.
    "old_parameters": Program(
        Setting(),
        [
            step("backward"),
            step("clip", kind="old"),
            step("read", kind="old"),
            step("write", how="old"),
            step("forward"),
        ],
    ),
    # A retained loss runs backward again, after ranks have run one block each. The last unit is kept on one rank only.
    "older_loss_after_other_blocks": Program(
        Setting(),
        [
            step("forward"),
            step("backward", retain=True),
            step("apart", orders=((0,), (1,))),
            step("backward", retain=True),
        ],
    ),
    # A backward of a forward before the last, in which ranks have run blocks in orders of their own.
    "older_loss_in_other_orders": Program(
        Setting(strategy=2, units="fine"),
        [step("apart", orders=((0, 1), (1, 0))), step("hooked", kind="forward"), step("backward")],
    ),
    # Ranks that run blocks in orders of their own, after an iteration in which all ran them in one.
    "orders_of_each_rank": Program(
        Setting(strategy=2),
        [
            step("forward", order=(1, 1, 0)),
            step("backward"),
            step("apart", orders=((0, 1), (1, 0))),
            step("backward"),
            step("optimize"),
            step("apart", orders=((0, 1), (0,))),
            step("backward"),
        ],
    ),
    # Other micro-batches run between a forward, in which some ranks have run fewer blocks, and its backward.
    "other_micro_batches_before_backward": Program(
        Setting(), [step("apart", orders=((0, 1), (0,))), step("accumulate"), step("backward")]
    ),
    # A unit that a reentrant checkpoint hides was reduced before its backward, where ranks differ in their order.
    "other_orders_in_reentrant_checkpoints": Program(
        Setting(strategy=2, features=Features(checkpoint="around", reentrant=True)),
        [step("apart", orders=((0, 1), (1, 0))), step("hooked", kind="output"), step("backward")],
    ),
    # A module outside of units that is called directly, with ZeRO-0 and tensor parallelism: torch's AttributeError.
    #
    # Its weights are the main weights, with which F.linear returned a plain tensor; torch's parallel styles expect a
    # DTensor.
    "part_of_a_tensor_parallel_model": Program(Setting(ranks=4, mesh="tp", strategy=0, units="whole"), [step("part")]),
    # A gradient penalty's backward after another forward.
    "penalty_after_forward": Program(Setting(), [step("penalty", forward=True)]),
    # A gradient penalty of a model whose parameters are all frozen.
    "penalty_of_a_frozen_model": Program(Setting(), [step("freeze", what="all", frozen=True), step("penalty")]),
    # A pickled state dict is loaded.
    "pickled_state": Program(Setting(), [step("save", kind="pickle", optimizer=True), step("optimize"), step("load")]),
    # Weights were gathered for the first backward, after an evaluation. Later, some ranks run fewer blocks.
    "plan_recorded_after_evaluation": Program(
        Setting(), [step("forward"), step("forward", mode="no_grad"), step("backward"), step("apart"), step("backward")]
    ),
    # The first backward is that of one block; then each rank runs another one.
    "plan_without_reductions": Program(
        Setting(),
        [
            step("part", index=0),
            step("backward"),
            step("apart", orders=((0,), (1,))),
            step("backward"),
            step("optimize"),
        ],
    ),
    # Some ranks run fewer blocks, which reentrant checkpointing recomputes, in the first iteration.
    "recomputed_blocks_of_some_ranks": Program(
        Setting(features=Features(checkpoint="around", reentrant=True)),
        [
            step("apart", orders=((0, 1), (0,))),
            step("backward"),
            step("apart", orders=((0, 1), (0,))),
            step("backward"),
        ],
    ),
    # As part_of_a_tensor_parallel_model.py, without a graph: torch refuses tensors of several meshes.
    "recomputed_part_of_a_tensor_parallel_model": Program(
        Setting(ranks=4, mesh="tp", strategy=0, units="whole", features=Features(checkpoint="inside", reentrant=True)),
        [step("part")],
    ),
    # Sums of squares and full tensors of weights in a loss.
    "regularizer": Program(
        Setting(), [step("regularized", kind="pow"), step("regularized", kind="full"), step("optimize")]
    ),
    # The output of a block is that of its last layer, a unit as well, so hooks come to the layer before the block.
    "nested_units_with_one_output": Program(
        Setting(interface="fsdp2", units="nested", features=Features(returns="inner")),
        [step("apart", orders=((0, 1), ())), step("backward")],
    ),
    # Blocks' outputs are no tensors, so hooks come to the blocks before the root, whose weights are gathered again.
    "root_after_blocks": Program(
        Setting(interface="fsdp2", features=Features(returns="iterator")),
        [step("apart", orders=((0,), (1,))), step("backward")],
    ),
    # An evaluation has resharded a root that was kept for the backward.
    "root_after_blocks_and_evaluation": Program(
        Setting(features=Features(returns="iterator")),
        [step("apart", orders=((0,), (1,))), step("forward", mode="no_grad"), step("backward")],
    ),
    # After a backward, a unit whose inputs need no gradients was no longer known to be in the graph of a second one.
    "second_backward_of_other_blocks": Program(
        Setting(features=Features(embedded=True)),
        [step("closure"), step("apart"), step("backward", retain=True), step("backward")],
    ),
    # Ranks run one block each without a backward. The weights of both stay unsharded on all ranks.
    "skipped_units_that_stay_unsharded": Program(
        Setting(interface="fsdp2", strategy=2),
        [step("apart", orders=((0,), (1,))), step("forward", order=(1, 1, 0)), step("backward"), step("backward")],
    ),
    # A mean teacher that was sharded while other weights were frozen: operands "are sharded differently".
    "teacher_with_other_frozen_weights": Program(
        Setting(ranks=3, interface="fsdp2", strategy=2),
        [step("freeze", what="up", frozen=True), step("teach", how="lerp_")],
    ),
    # A unit that a forward has skipped is unsharded by its caller.
    "unshard_of_a_skipped_unit": Program(
        Setting(interface="fsdp2", strategy=2), [step("forward", order=()), step("method", name="unshard")]
    ),
    # A backward of a loss from before the optimizer's step, which raises in plain torch.
    "weights_of_a_later_step": Program(
        Setting(strategy=2), [step("forward", batch=1), step("closure"), step("backward")]
    ),
    # A second backward from the output of a unit that uses a tied weight of another one, which was not gathered.
    "tied_weight_behind_an_output": Program(
        Setting(units="nested", features=Features(tied="blocks")), [step("captured", index=1, after="backward")]
    ),
    # A write after a forward without a step.
    "write_after_forward": Program(
        Setting(strategy=1),
        [step("forward", mode="no_grad"), step("write", how="foreach", what="head"), step("forward")],
    ),
    # A weight that is written after its use in a forward, whose gradients inside need it as it was.
    "write_after_its_use": Program(
        Setting(interface="fsdp2", strategy=2, units="fine", watch=True, features=Features(forces="graph")),
        [step("optimize"), step("write_inside", when="after")],
    ),
    # A forward writes a weight of a unit that is not unsharded yet, and whose inner shard stays in memory.
    "write_in_forward_of_outer_shards": Program(
        Setting(ranks=4, mesh="hsdp", outer=1, overlap=False),
        [step("accumulate", count=1), step("write_in_forward", how="in place")],
    ),
    # A rank that runs no block writes its weights while the others gather them.
    "written_while_others_gather": Program(
        Setting(slow="all"), [step("backward"), step("apart", orders=((0, 1), ())), step("write_gradients")]
    ),
    # An optimizer's zero_grad, when a frozen parameter that it does not have has a gradient.
    "zero_grad_of_others": Program(
        Setting(groups="part"), [step("backward"), step("freeze", what="head"), step("zero_grad")]
    ),
    # zero_grad(set_to_none=False), and a step with weight decay.
    "zeros_stay_gradients": Program(
        Setting(optimizer="momentum"), [step("backward"), step("zero_grad", to_none=False), step("optimize")]
    ),
}
# Known defects: a test expects that they fail.
OPEN: dict[str, Program] = {}
