"""Groups of nodes: their connections, their shares, and what is told where numbers change."""

from __future__ import annotations

from mutants.mutant import Mutant

LINKS = "tests/test_group_links.py"
DIFFERENCES = "tests/recovery/test_differences.py"
RUNS = "tests/test_tensor_runs.py"

MUTANTS = [
    Mutant(
        "the first message that a node lacks is not sent again",
        "Peer.replace",
        "number >= first",
        "number > first",
        LINKS,
    ),
    Mutant(
        "half a message of a broken connection is the beginning of the next one",
        "Peer.replace",
        "self._broken = 0, [], None",
        "self._broken = self._got, [], None",
        f"{LINKS}::test_a_message_that_is_cut_in_the_middle",
    ),
    Mutant("messages that nobody can lack are kept for ever", "Peer._next_sum", "= n_sent", "= 0", LINKS),
    Mutant("the messages of the last sum are not kept", "Peer._next_sum", "< self._n_before", "< n_sent", LINKS),
    Mutant(
        "a node asks for a message that it has", "Peer.received", "self._n_read - 1 if", "self._n_read - 2 if", LINKS
    ),
    Mutant(
        "a node asks for no message that it lacks", "Peer.received", "self._n_read - 1 if", "self._n_read if", LINKS
    ),
    Mutant(
        "what the kernels have sent is not kept",
        "Peer.take_back",
        "self._kept.append((number, data))",
        "pass",
        f"{LINKS}::test_frames_go_on_whatever_breaks_while_they_are_computed",
    ),
    Mutant(
        "the kernels take any message for the awaited one",
        "csrc:exchange",
        "if (std::memcmp(awaited, mesh.lines[rank]->in, kHead) != 0) return false;",
        "",
        "tests/test_tensor_sums.py::test_nodes_that_sum_different_things_notice",
    ),
    Mutant(
        "the kernels leave the last node's part out",
        "csrc:add_up",
        "rank < mesh.size;",
        "rank < mesh.size - 1;",
        "tests/test_tensor_sums.py::test_all_nodes_have_the_same_bits_and_the_sum",
    ),
    Mutant("the caller does not say what it has", "Dialer._call", "received=received", "received=None", LINKS),
    Mutant(
        "what is sent again is the array after the sum",
        "Mesh._copy",
        "memoryview(buffer)[: data.nbytes]",
        "data",
        f"{LINKS}::test_a_node_that_has_done_its_part_sends_it_again_though_it_computes_nothing",
    ),
    Mutant(
        "a copy is written over before it can be forgotten",
        "Mesh._next_copies",
        "self._copies.popleft()",
        "self._copies.pop()",
        f"{LINKS}::test_messages_of_two_sums_are_sent_again",
    ),
    Mutant(
        "a node that is called again stays with a connection that looks intact",
        "Reconnects._hear",
        'peer.abandon("it connected again")',
        "None",
        f"{LINKS}::test_a_connection_that_is_broken_on_one_side_only",
    ),
    Mutant(
        "another ring of as many nodes has other shares",
        "SharingOut._ranks",
        "place in self._shared",
        "False",
        f"{RUNS}::test_a_node_that_was_started_again_leaves_all_shares_as_they_are",
    ),
    Mutant(
        "the node of the last rank sends the result on, wherever it stands",
        "SharingOut._groups_of",
        "is_last=name == stage.members[-1]",
        "is_last=name == names[-1]",
        f"{RUNS}::test_a_node_that_was_started_again_leaves_all_shares_as_they_are",
    ),
    Mutant(
        "shares do not count among what numbers depend on", "numbers_of", ".append([share,", ".append([0,", DIFFERENCES
    ),
    Mutant("torch counts as exact", "numbers_of", "found not in IN_KERNELS", "False", DIFFERENCES),
    Mutant("rounded links count as exact", "numbers_of", "place > 0 and block == start", "False", DIFFERENCES),
    Mutant("a GPU counts as its processor", "arithmetic_of", 'device == "cpu"', "True", DIFFERENCES),
    Mutant(
        "every other ring counts as exact",
        "Former.close",
        "before is None or before.numbers == ring.numbers",
        "True",
        f"{RUNS}::test_texts_go_on_when_a_node_is_lost",
    ),
    Mutant(
        "tokens are counted from the beginning of the prompt",
        "differing",
        "- sample.request.n_prompt",
        "- 0",
        f"{RUNS}::test_texts_go_on_when_a_node_is_lost",
    ),
    Mutant(
        "a second change hides the first",
        "RingLoop._note",
        "self.differs_from.setdefault(seq_id, n_ids)",
        "self.differs_from.update({seq_id: n_ids})",
        DIFFERENCES,
    ),
    Mutant(
        "a planned move is not noted", "RingLoop._note", "or ring.is_exact", "or ring.is_exact or not lost", DIFFERENCES
    ),
    Mutant("the second loss in a row hides the first", "Records.replace", "**one.differs", "**{}", DIFFERENCES),
    Mutant(
        "a run that is resumed on other shares does not say so",
        "Journaling.begin",
        "session.numbers != self._record.numbers",
        "False",
        DIFFERENCES,
    ),
    Mutant(
        "a resumed run forgets that a text differs already",
        "Journaling.begin",
        "min(known, len(text.ids))",
        "len(text.ids)",
        DIFFERENCES,
    ),
]
