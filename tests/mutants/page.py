"""The page: its Markdown, and what it says of the ring. Fields and counts of the API. What commands say."""

from __future__ import annotations

from mutants.mutant import Mutant

PAGE = "tests/page/test_page.py"
LONG = f"{PAGE}::test_no_line_takes_the_page_long"
LOSS = f"{PAGE}::test_a_loss_is_told_while_an_answer_waits"
DRAWN = f"{PAGE}::test_markdown_is_drawn"
RING = f"{PAGE}::test_the_ring_and_a_node_that_does_not_answer"
LIVE = "tests/page/test_live.py"
KEEPER = "tests/recovery/test_policy.py::test_why_the_texts_wait_is_said_until_they_go_on"
FAULTS = "tests/serve/test_serve_faults.py"
TEXTS = "tests/serve/test_serve_texts.py"

MUTANTS = [
    # Expressions that can match the same characters in several ways
    Mutant(
        "a line has separators in it at which an expression gives up", "files/markdown.js:LINE_END", r"\u2028", "", LONG
    ),
    Mutant(
        "a fence is matched in many ways",
        "files/markdown.js:FENCE",
        "(`{3,}|~{3,})/",
        r"(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/",
        f"{LONG}[fence]",
    ),
    Mutant(
        "a heading is matched in many ways",
        "files/markdown.js:titleOf",
        "rest.trim()",
        'rest.replace(/(?: +#+)? *$/, "")',
        f"{LONG}[heading]",
    ),
    Mutant(
        "the line below a table's head is matched in many ways",
        "files/markdown.js:isTableLine",
        'line.includes("|")',
        r"/^ *\|?(?: *:?-+:? *\|)+ *(?::?-+:? *)?$/.test(line)",
        f"{LONG}[table]",
    ),
    Mutant(
        "a link is matched in many ways",
        "files/inline.js:LINK_WORDS",
        r"\(\s*<?/y",
        r"\(\s*<?([^\s)>]{0,2000})>?(?:\s+)?\s*\)/y",
        f"{LONG}[link]",
    ),
    Mutant(
        "every line below one with a bar makes a table",
        "files/markdown.js:isTableLine",
        "TABLE_MARK.test(cell)",
        "true",
        f"{LONG}[table]",
    ),
    Mutant("marks at a heading's end are shown", "files/markdown.js:titleOf", 'title[end - 1] === "#"', "false", DRAWN),
    Mutant(
        "a link leads to what its words say",
        "files/inline.js:takeLink",
        "LINK_WORDS.lastIndex",
        "at + 1",
        f"{PAGE}::test_hostile_output_stays_text",
    ),
    # What the page says
    Mutant(
        "the dot stays green while the texts wait",
        "files/app.js:look",
        "trouble ? own.state : ",
        "",
        LOSS,
    ),
    Mutant("an answer that waits does not say why", "files/app.js:look", "chat.see(own,", "chat.see({},", LOSS),
    Mutant("a warning looks like any other event", "files/ring.js:event", 'level === "warning"', "false", LOSS),
    Mutant("a delay within its error is shown as known", "files/units.js:delay", "error > known", "false", RING),
    Mutant(
        "percents are rounded one by one",
        "files/units.js:percents",
        "whole[i] += 1",
        "whole[i] += 0",
        f"{PAGE}::test_shares_of_a_nodes_time_are_all_of_it",
    ),
    Mutant(
        "all arcs are alike",
        "files/arcs.js:spans",
        "* n) / all",
        "* 1) / nodes.length",
        f"{PAGE}::test_arcs_are_as_long_as_blocks_and_frames_move_along_them",
    ),
    Mutant(
        "reasoning is sent back",
        "files/message.js:said",
        'part.type !== "reasoning"',
        "true",
        f"{PAGE}::test_reasoning_is_folded_and_calls_are_shown",
    ),
    Mutant(
        "an answer that was stopped does not say how long it is",
        "files/chat.js:figures",
        "n ?? n_pieces",
        "n ?? 0",
        f"{PAGE}::test_stop_and_regenerate",
    ),
    Mutant(
        "a ring that is formed again counts as working",
        "ring_words",
        '"recovering" if trouble else',
        '"recovering" if False else',
        LIVE,
    ),
    Mutant("links are blamed while nothing moves", "ring_words", 'not ring["tokens_s"]', "False", LIVE),
    Mutant("a node that does not answer is said to wait", "node_state", "trouble and own", "trouble", LIVE),
    Mutant(
        "a node computes and waits for more than all of the time",
        "shares",
        'min(found["waiting"], 1.0 - found["busy"] - found["sending"])',
        'found["waiting"]',
        LIVE,
    ),
    Mutant(
        "the trouble is over and is told further",
        "Policy.formed",
        'self.ring, self.processes, self.trouble = tuple(ring), dict(processes), ""',
        "self.ring, self.processes = tuple(ring), dict(processes)",
        KEEPER,
    ),
    Mutant(
        "why blocks move is not told",
        "RingLoop.next_ring",
        '"blocks move to other nodes; the texts wait"',
        '""',
        KEEPER,
    ),
    Mutant(
        "a loss is an event like any other",
        "History.emit",
        "record.levelno >= logging.WARNING",
        "False",
        "tests/serve/test_several_models.py::test_a_loss_is_told_to_the_page_whether_it_is_open_or_not",
    ),
    Mutant(
        "nobody says that the server is ready",
        "ModelHost._load",
        "self._on_ready(name)",
        "None",
        "tests/serve/test_serve_page.py::test_events_begin_with_the_server_and_its_log_says_when_it_is_ready",
    ),
    # Fields and counts of the API
    Mutant(
        "fields without a value are refused",
        "serve.request:read_fields",
        "value is not None",
        "True",
        f"{FAULTS}::test_fields_of_other_servers_are_ignored",
    ),
    Mutant(
        "all unknown fields are compared",
        "serve.request:check_spelling",
        "MOST_COMPARED",
        "None",
        f"{FAULTS}::test_only_some_unknown_fields_are_compared_because_it_takes_long",
    ),
    Mutant(
        "fields of other servers are refused",
        "serve.request:ALIKE",
        "0.85",
        "0.8",
        f"{FAULTS}::test_fields_of_other_servers_are_ignored",
    ),
    Mutant(
        "misspelt fields are ignored",
        "serve.request:read_fields",
        "check_spelling(kind, given)",
        "None",
        f"{FAULTS}::test_a_misspelt_field_is_named",
    ),
    Mutant(
        "functions are ignored",
        "Chat.__init__",
        "fields.functions",
        "None",
        f"{FAULTS}::test_calls_in_the_old_form_are_refused",
    ),
    Mutant(
        "the older limit goes before the newer one",
        "common_fields",
        "fields.max_completion_tokens or fields.max_tokens",
        "fields.max_tokens or fields.max_completion_tokens",
        f"{FAULTS}::test_fields_of_other_servers_are_ignored",
    ),
    Mutant(
        "cached tokens are not counted",
        "Sequence.begin_behind",
        "self.n_reused = n",
        "self.n_reused = 0",
        f"{TEXTS}::test_a_second_turn_begins_behind_the_first_for_the_same_key_alone",
    ),
    Mutant(
        "an answer begins with a blank",
        "Chat.delta",
        "or not is_plain",
        "or True",
        f"{TEXTS}::test_a_stream_is_the_whole_answer_in_pieces",
    ),
    Mutant(
        "a model's context is not told",
        "_Models._entry",
        "if is_loaded else None",
        "if False else None",
        f"{TEXTS}::test_models",
    ),
    # Commands
    Mutant(
        "a mistyped command gets the list of all",
        "cli.__init__:main",
        "difflib.get_close_matches(args[0], COMMANDS, 1)",
        "[]",
        "tests/test_cli.py::test_console_command",
    ),
    Mutant(
        "a comma too many is not told",
        "spec/cluster:read_json",
        "if is_after_comma",
        "if False",
        "tests/test_config.py",
    ),
    Mutant(
        "a web page in place of config.json is not told",
        "read_hf_config",
        'text[:200].lstrip().startswith("<")',
        "False",
        "tests/test_prepare.py::test_what_cannot_be_converted",
    ),
    Mutant(
        "damage is found after torch was imported",
        "prepare_model:_check_files",
        "is_lit_dir(directory) or is_lit_dir(target)",
        "True",
        "tests/test_prepare.py::test_a_damaged_file_is_told_before_torch_is_imported",
    ),
    Mutant(
        "commands are named that are not there",
        "called",
        "launchers() is None",
        "False",
        "tests/test_prepare.py::test_what_is_to_be_called_next_is_there",
    ),
    Mutant(
        "prompts without a token are shown after an interruption",
        "cli.output:report",
        "failure is None or sample.token_ids",
        "True",
        "tests/test_report.py",
    ),
    Mutant(
        "blocks that were laid out by hand are said to be shared out",
        "Choice._place",
        "if options.layers else",
        "if False else",
        "tests/test_planning.py::test_what_is_given_is_not_measured",
    ),
    Mutant(
        "matplotlib warns of a home that cannot be written",
        "cli.__init__:_set_up_logging",
        "setLevel(logging.ERROR)",
        "setLevel(logging.NOTSET)",
        "tests/test_cli.py::test_a_home_that_cannot_be_written_is_no_matter_without_figures",
    ),
    Mutant(
        "a chat says nothing while it loads",
        "cli.chat:converse",
        'logger.info("loading',
        'logger.debug("loading',
        "tests/test_chat.py::test_it_greets_a_person_and_knows_its_commands",
    ),
]
