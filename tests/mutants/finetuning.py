"""Fine-tuning over a ring: outputs of single blocks, what is learned from them, and what is done with it."""

from __future__ import annotations

from mutants.mutant import Mutant

FILE = "tests/test_finetune.py"
ROWS = f"{FILE}::test_rows_are_those_of_the_reference_once_each_and_in_order"
NODES = f"{FILE}::test_the_loss_curve_is_the_same_on_any_number_of_nodes"
RESUMED = f"{FILE}::test_what_was_interrupted_goes_on_to_the_same_bits"
TEXTS = f"{FILE}::test_texts_are_those_of_the_reference_with_the_side_network"
CHOSEN = f"{FILE}::test_each_text_has_the_side_network_that_it_names"
DISK = f"{FILE}::test_the_disk_is_private_and_reckoned_before_anything_is_computed"
STRANGER = f"{FILE}::test_a_strangers_side_network_is_checked"
BLOCKS = "tests/backends/test_backends.py::test_outputs_of_single_blocks_are_those_of_the_model_and_change_nothing"

RING = "tests/test_ring_blocks.py"
THROUGH = "tests/test_ring_training.py"
LITGPT = f"{THROUGH}::test_rows_and_gradients_are_those_of_litgpt"
STEP = f"{THROUGH}::test_a_step_has_the_gradients_of_one_machine"
HEAD = "tests/test_frozen_head.py::test_losses_and_gradients_are_those_of_torch"
KEPT = "tests/test_frozen_head.py::test_from_logits_that_were_kept_they_are_the_same"

MUTANTS = [
    Mutant(
        "LoRA reads rows without the gain of their norm",
        "PlainBlocks._add_adapters",
        "a if factor is None else a * torch.tensor(factor)",
        "a",
        f"{THROUGH}::test_packed_blocks_have_the_gradients_of_the_numbers_that_they_stand_for",
    ),
    Mutant(
        "LoRA adds to the first results of a layer",
        "_added",
        "(first, found.size(-1) - first - b.size(1))",
        "(0, found.size(-1) - b.size(1))",
        f"{LITGPT}[lora]",
    ),
    Mutant(
        "a prompt changes the rows behind it",
        "PlainBlocks._block",
        "prompt[: x.size(1)]",
        "prompt.mean()",
        f"{LITGPT}[deep-prompt]",
    ),
    Mutant("rows behind a prefix have the first positions", "PlainBlocks._block", "len(key)", "0", f"{LITGPT}[prefix]"),
    Mutant(
        "a row sees a prefix and all rows behind it",
        "PlainBlocks._add_prefix.with_prefix",
        'float("-inf")',
        "0.0",
        f"{LITGPT}[prefix]",
    ),
    Mutant("only the last part of a step is learned from", "RingTraining.learn", "bool(sums)", "False", STEP),
    Mutant("rows of a text begin in its prompt", "TunedModel.__call__", "len(before)", "0", STEP),
    Mutant(
        "a node takes tensors of other blocks",
        "read_shapes",
        "not start <= block < stop",
        "False",
        f"{THROUGH}::test_a_node_takes_no_other_tensors_than_its_blocks_have",
    ),
    Mutant(
        "rows of B that stand group by group are taken in their order",
        "Lora.of_blocks",
        "one.is_interleaved",
        "False",
        f"{THROUGH}::test_the_folder_of_lora_is_what_the_nodes_had",
    ),
    Mutant(
        "values of a prefix stand before its keys",
        "Prefix._take",
        "self.of_blocks()",
        "reversed(self.of_blocks())",
        f"{THROUGH}::test_what_was_written_is_read_again[prefix]",
    ),
    Mutant("a cap of the logits has no slope", "_Cross.forward", "slope is not None", "False", HEAD),
    Mutant(
        "what a norm takes away as the mean stays", "FrozenHead.__init__", "weight.mean(dim=1, keepdim=True)", "0", HEAD
    ),
    Mutant("a norm's shift is left out", "FrozenHead.__init__", "weight @ shift", "0 * shift.sum()", HEAD),
    Mutant(
        "kept logits keep the length of the row",
        "FrozenHead.loss_of_kept",
        "self.length(x) / length",
        "length / length",
        KEPT,
    ),
    Mutant(
        "a bias is in kept logits twice", "_Cross.forward", "kept[at].to(a.dtype) - bias", "kept[at].to(a.dtype)", KEPT
    ),
    Mutant(
        "a row's length has no gradient",
        "_Cross.forward",
        "torch.linalg.vecdot(gradient, base)[:, None] / whole",
        "0",
        KEPT,
    ),
    Mutant(
        "what goes through the head's product is not learned",
        "SideTraining.learn",
        "projected is not None and self._head is not None",
        "False",
        f"{FILE}::test_kept_logits_give_the_same_losses",
    ),
    Mutant(
        "peft does not find the classes beside a prompt",
        "TunedTensors._in_file",
        "name == SCORE",
        "False",
        "tests/test_ring_training.py::test_classes_have_the_name_under_which_peft_looks_for_them",
    ),
    Mutant(
        "what a stranger has learned is copied to all rows",
        "read_tensors",
        "file.specs != wanted",
        "False",
        f"{THROUGH}::test_what_a_stranger_has_learned_is_checked",
    ),
    Mutant(
        "classes of other weights are used",
        "read_tensors",
        "file.metadata.get(BASE_KEY, base) != base",
        "False",
        f"{THROUGH}::test_what_a_stranger_has_learned_is_checked",
    ),
    Mutant(
        "damaged logits are used",
        "SideTraining.keep_logits",
        "logits.missing()",
        "[]",
        f"{FILE}::test_kept_logits_give_the_same_losses",
    ),
    Mutant(
        "a gradient goes through the blocks in the wrong order",
        "PlainBlocks.backward",
        "reversed(range(start, stop))",
        "range(start, stop)",
        f"{RING}::test_a_stages_gradients_are_those_of_the_model",
    ),
    Mutant(
        "a backward pass takes the inputs that were computed with other tensors",
        "_hash_of_pass",
        "found.update(np.ascontiguousarray(array).data)",
        "pass",
        f"{RING}::test_inputs_of_blocks_are_computed_once_as_long_as_there_is_memory_for_them",
    ),
    Mutant(
        "tensors are sent with each question",
        "Passes._give",
        "known.sets.use(sha256)",
        "None",
        f"{THROUGH}::test_a_step_sends_and_gets_the_bytes_of_the_documents[lora]",
    ),
    Mutant(
        "nodes get tensors of other nodes' blocks",
        "Passes._asked",
        "of_blocks(trained, stage.start, stage.stop) if own else NONE",
        "trained",
        f"{THROUGH}::test_a_step_sends_and_gets_the_bytes_of_the_documents[lora]",
    ),
    Mutant(
        "tensors that a node lacks are not sent again",
        "Passes._asked",
        'e.code == "tensors" and sha256 is not None',
        "False",
        f"{THROUGH}::test_a_node_keeps_the_tensors_that_were_used_last",
    ),
    Mutant(
        "a node keeps the tensors of all steps",
        "LastSets.put",
        "len(self._sets) > N_KEPT",
        "False",
        f"{THROUGH}::test_a_node_keeps_the_tensors_that_were_used_last",
    ),
    Mutant(
        "a node takes tensors with another hash",
        "SecondaryNode.take_tensors",
        "sha256.hexdigest() != request.sha256",
        "False",
        f"{THROUGH}::test_a_node_takes_no_other_tensors_than_its_blocks_have",
    ),
    Mutant(
        "plain weights of all blocks stay",
        "PlainBlocks._block",
        "plain(dict(self._weights(index)))",
        "vars(self).setdefault(str(index), plain(dict(self._weights(index))))",
        f"{RING}::test_a_pass_has_the_plain_weights_and_the_activations_of_one_block[nothing]",
    ),
    Mutant(
        "plain weights of a block with a prefix stay until garbage is collected",
        "PlainBlocks._add_prefix",
        "weakref.proxy(attention)",
        "attention",
        f"{RING}::test_a_pass_has_the_plain_weights_and_the_activations_of_one_block",
    ),
    Mutant(
        "a gradient goes through a part of the blocks twice",
        "Passes.backward",
        "self._back(rows, dy, start, end, trained)",
        "self._back(rows, dy, start, borders[-1][0], trained)",
        f"{RING}::test_gradients_through_the_ring_are_those_of_one_machine",
    ),
    Mutant(
        "a node computes blocks of other nodes",
        "SecondaryNode._computing",
        "not stage.start <= blocks[0] < blocks[1] <= stage.stop",
        "False",
        f"{RING}::test_a_node_takes_no_other_rows_than_its_run_has",
    ),
    Mutant(
        "outputs of earlier blocks come behind those of later ones",
        "TappedStage.__call__",
        "(before[n:], x[n:])",
        "(x[n:], before[n:])",
        ROWS,
    ),
    Mutant(
        "a piece of a stage begins with its first block", "Blocks._piece_of_stage", "(begin - self.start)", "0", BLOCKS
    ),
    Mutant(
        "outputs of a block are those of all rows",
        "KernelStage.__call__",
        "self.rows.wanting_logits(rows, slices).copy()",
        "rows.copy()",
        BLOCKS,
    ),
    Mutant("rows are wanted of the last token only", "Sequence.first_wanted", "self.read_from is None", "True", ROWS),
    Mutant(
        "a text ends with the first rows that come back",
        "Scheduler._take_drawn",
        "part.start + part.n_rows < len(sequence.ids)",
        "False",
        ROWS,
    ),
    Mutant(
        "the network adds nothing",
        "StarterEngine._add_sides",
        "(side := sides.get(sha256)) is not None",
        "False",
        TEXTS,
    ),
    Mutant(
        "a text has the side network of another one",
        "StarterEngine._add_sides",
        "self._live[seq_id].sequence.adapter",
        "next(iter(sides))",
        CHOSEN,
    ),
    Mutant(
        "a side network sees the taps of another one",
        "Run._with_taps",
        "self._taps.index(tap)",
        "side.shape.taps.index(tap)",
        CHOSEN,
    ),
    Mutant(
        "nodes take a side network for an adapter of theirs",
        "StarterEngine._sequence",
        "adapter and own.side is None",
        "adapter",
        CHOSEN,
    ),
    Mutant("the network's taps are mixed up", "SideNetwork._state", "(*seen, x)", "(x, *seen)", TEXTS),
    Mutant("an adapter of another model is taken", "check_base", "is_other or not fits", "False", STRANGER),
    Mutant(
        "numbers that are not finite are taken", "read_side", "not np.isfinite(tensors[name]).all()", "False", STRANGER
    ),
    Mutant("everybody may read the outputs", "_allocate", "0o600", "0o644", DISK),
    Mutant("outputs stay at the end", "_learn", "not asked.keep_features", "False", DISK),
    Mutant("moments of the optimizer begin anew", "Tuning.restore", 'f"step/{name}" in tensors', "False", RESUMED),
    Mutant(
        "damaged outputs are used",
        "StoredRows.missing",
        "done != (1 << 32) + zlib.crc32(self._of(index).data)",
        "False",
        f"{FILE}::test_damaged_outputs_are_computed_again",
    ),
    Mutant(
        "a node takes blocks that the model does not have",
        "taps_of",
        "not 0 <= taps[0] <= taps[-1] < n_layer",
        "False",
        f"{FILE}::test_blocks_that_the_model_does_not_have_are_refused_by_a_node",
    ),
    Mutant(
        "nodes without gradients get weights before they refuse",
        "NodeWeights.spec",
        "request.extensions.get(GRADIENTS) is True",
        "False",
        f"{THROUGH}::test_blocks_without_gradients_are_refused_before_weights_are_sent",
    ),
]
