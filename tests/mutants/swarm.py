"""A standing swarm: which blocks nodes hold, what they know of each other, and the rings over them."""

from mutants.mutant import Mutant

BALANCE, CHAIN = "tests/placement/test_balance.py", "tests/placement/test_chain.py"
TABLE, MEMBER, RUNS = (f"tests/swarm/test_{name}.py" for name in ("swarm_table", "swarm_member", "swarm_runs"))

PARTS = "tests/swarm/test_swarm_parts.py"

MUTANTS = [
    Mutant(
        "parts come from any node that has them",
        "SwarmMember._nearest",
        "sorted(found, key=lambda one: self._ways[one.label])",
        "found",
        f"{PARTS}::test_the_nearest_node_sends_them",
    ),
    Mutant(
        "only the nearest node is asked for a part",
        "SwarmMember._get_part",
        'logger.info("%s has not sent %s: %s", one.label, part.name, e)',
        "raise",
        f"{PARTS}::test_a_node_that_cannot_send_is_passed_over",
    ),
    Mutant(
        "only nodes with the whole model give parts",
        "swarm_member:_has",
        "(one.is_ready and block.isdigit() and one.start <= int(block) < one.stop)",
        "False",
        f"{PARTS}::test_parts_come_from_other_nodes_and_go_on_to_others",
    ),
    Mutant(
        "parts are sent to strangers",
        "SecondaryNode.forward",
        "request.run not in self.table.versions",
        "False",
        f"{PARTS}::test_strangers_get_and_give_no_parts",
    ),
    Mutant(
        "a node tells of another model than is asked for",
        "SecondaryNode.model",
        "model.weights != request.weights",
        "False",
        f"{PARTS}::test_strangers_get_and_give_no_parts",
    ),
    Mutant(
        "a config is believed",
        "SwarmModel.__init__",
        "if config_hash(facts.config) != facts.config_hash:",
        "if False:",
        f"{PARTS}::test_facts_that_do_not_fit_are_refused",
    ),
    Mutant(
        "a new node takes any span with the slowest block",
        "weakest_span",
        "np.lexsort(spans.T[::-1])[0]",
        "np.argmin(spans[:, 0])",
        f"{BALANCE}::test_a_new_node_takes_the_weakest_span",
    ),
    Mutant(
        "moves need not gain the margin",
        "balance:plan",
        "if not _speeds(speed, found, sizes, n_layer).min() > least * (1 + margin):",
        "if not _speeds(speed, found, sizes, n_layer).min() > least:",
        f"{BALANCE}::test_the_margin_decides_whether_a_node_moves",
    ),
    Mutant(
        "the plan depends on the order of the nodes",
        "balance:plan",
        "nodes = sorted(nodes, key=lambda node: node.name)",
        "nodes = list(nodes)",
        f"{BALANCE}::test_moves_gain_more_than_the_margin_and_stay_within_the_model",
    ),
    Mutant(
        "only the best single moves are tried",
        "_search",
        "for _ in range(n_tries):",
        "for _ in range(0):",
        f"{BALANCE}::test_small_swarms_come_near_the_best_of_all_assignments",
    ),
    Mutant(
        "a node comes twice in a chain",
        "_shortest",
        "if holder.name in used:",
        "if False:",
        CHAIN,
    ),
    Mutant(
        "a chain is not cut evenly",
        "choose_chain",
        "found = _even(path, by_name)",
        "found = path",
        f"{CHAIN}::test_blocks_that_two_nodes_hold_are_shared_evenly",
    ),
    Mutant(
        "an announcement that is repeated becomes younger",
        "SwarmTable.add",
        "known[1].version < one.version",
        "known[1].version <= one.version",
        TABLE,
    ),
    Mutant(
        "the age of an announcement is forgotten on its way",
        "SwarmTable.add",
        "now - one.age_s, one",
        "now, one",
        TABLE,
    ),
    Mutant(
        "all is told again and again",
        "SwarmTable.newer_than",
        "if versions.get(one.process, -1) < one.version",
        "if True",
        TABLE,
    ),
    Mutant(
        "blocks beyond the model are believed",
        "control.swarm:_check",
        "if one.stop > one.n_layer:",
        "if False:",
        TABLE,
    ),
    Mutant(
        "a node that leaves still counts",
        "SwarmMember._others",
        "and not one.is_leaving",
        "",
        f"{MEMBER}::test_a_span_that_is_lost_is_taken_over",
    ),
    Mutant(
        "memory that is short is not given back",
        "SwarmMember._mind_memory",
        "if free >= spare or",
        "if True or",
        f"{MEMBER}::test_a_node_whose_memory_others_need_gives_its_blocks_back_and_takes_some_again",
    ),
    Mutant(
        "a ring goes over nodes with another format",
        "Swarm.choose",
        "if (one.weights, one.form) == (weights, form)",
        "if one.weights == weights",
        f"{RUNS}::test_a_ring_has_one_format",
    ),
]
