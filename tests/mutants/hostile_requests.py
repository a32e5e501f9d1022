"""What strangers and model's authors can do to the server: limits, cancels, web pages, bodies, paths, calls."""

from mutants.mutant import Mutant

OPERATE = "tests/serve/test_operate.py"
TEMPLATES, SCHEMAS = "tests/serve/test_templates.py", "tests/serve/test_schemas.py"
PATHS, PARTS, BODIES = "tests/serve/test_api_paths.py", "tests/serve/test_serve_parts.py", "tests/serve/test_bodies.py"
COSTS = f"{TEMPLATES}::test_a_chat_that_costs_too_much_is_refused_and_the_next_one_is_written"
PAGES = "tests/test_control.py::test_what_a_web_page_sends_is_refused_unread"
CUT = f"{PARTS}::test_a_call_that_is_cut_off_is_no_content"

MUTANTS = [
    Mutant("the memory of a rendering process has no limit", "limit_process", "(most, most)", "(-1, -1)", f"{COSTS}[width]"),
    Mutant("a process that has ended gets the next chat", "ChatTemplate._rendered", "not is_usable", "False", f"{COSTS}[loop]"),
    Mutant("an unloaded model's template starts a process", "ChatTemplate._check_open", "self._is_closed", "False",
           f"{TEMPLATES}::test_an_unloaded_model_renders_no_chat"),
    Mutant("a process whose client went away checks the next schema", "SchemaChecks.check", "BaseException", "ValueError",
           f"{SCHEMAS}::test_a_client_that_goes_away_leaves_no_process_for_the_next_one"),
    Mutant("one schema is compiled after the other", "Backend.__init__", "N_FORMS", "1",
           f"{SCHEMAS}::test_a_schema_that_is_compiled_holds_up_no_other_one"),
    Mutant("a text that was cancelled while its schema was compiled is begun", "Backend._form", "if number in self._forming",
           "if True", f"{SCHEMAS}::test_a_text_that_is_cancelled_while_its_schema_is_compiled_is_not_begun"),
    Mutant("the schema of a cancelled text is compiled", "Backend._form", "if number not in self._forming", "if False",
           f"{SCHEMAS}::test_a_schema_whose_text_was_cancelled_is_not_compiled"),
    Mutant("a cancel may come between the compiled schema and the beginning of its text", "Backend._take",
           "with self._beginning", "with threading.Lock()",
           f"{SCHEMAS}::test_a_text_that_is_cancelled_while_it_is_begun_is_cancelled"),
    Mutant("a node takes requests of web pages", "check_sender", 'headers.get("Origin") is not None', "False", PAGES),
    Mutant("a node without a key answers to any name", "check_sender", "is_open and host", "False", PAGES),
    Mutant("a node reads bodies of forms", "check_sender", 'headers.get("Content-Type", "")', '""', PAGES),
    Mutant("a name with a domain counts as local", "is_local_name", '"." not in name', "True", PAGES),
    Mutant("who comes through a proxy is on this machine", "serve.operate:is_from_here", 'b"x-forwarded-for"', 'b"nothing"',
           f"{OPERATE}::test_who_is_an_operator"),
    Mutant("everybody is an operator where there are no keys", "serve.operate:is_from_here", "is_loopback", "is_private",
           f"{OPERATE}::test_who_is_an_operator"),
    Mutant("foreign web pages may load models", "Guard.__call__", "is_own_page(headers) and", "True and",
           f"{OPERATE}::test_who_is_an_operator"),
    Mutant("a code is shown without https", "serve.operate:routes", 'what == "invite" and', "False and",
           f"{OPERATE}::test_a_code_is_shown_on_https_or_on_the_own_machine"),
    Mutant("a revoked invitation stays open", "Machines._close", "self._server.close()", "pass",
           f"{OPERATE}::test_an_invitation_that_is_over"),
    Mutant("a server reads bodies of forms", "Guard.__call__", 'headers.get("content-type", "")', '""',
           f"{PATHS}::test_what_a_foreign_web_page_sends_is_refused_unread"),
    Mutant("lists of a body are not counted", "_n_lists", 'piece.count(b"[")', "0",
           f"{BODIES}::test_a_body_of_too_many_values_is_refused"),
    Mutant("brackets in texts count as lists", "serve.endpoint:_check_counts", "[::2]", "[:]",
           f"{BODIES}::test_a_large_body_is_read_as_it_was_sent"),
    Mutant("a large body is parsed on the loop", "Exchange.parsed", "len(data) < LARGE_BYTES", "True",
           f"{BODIES}::test_the_loop_goes_on_while_a_large_body_is_read"),
    Mutant("all prompts are looked at before they are counted", "serve.completions:_prompts",
           "len(given) > MOST_CHOICES", "False", f"{BODIES}::test_too_many_prompts_are_refused_by_their_number"),
    Mutant("a call may have keys that its schema does not name", "_closed", 'closed.setdefault("additionalProperties", False)',
           "None", f"{PARTS}::test_a_call_has_no_keys_that_its_schema_does_not_name"),
    Mutant("a schema that joins others is closed", "_closed", "any(word in closed for word in _JOINED)", "False",
           f"{PARTS}::test_a_schema_that_says_more_about_keys_is_left_as_it_is"),
    Mutant("a demanded call that was cut off is shown as content", "ToolUse.is_cut_call", "self.forced or", "False or", CUT),
    Mutant("a cut call of the model's own choice is shown as content", "ToolUse.is_cut_call", "begun is not None and",
           "False and", CUT),
    Mutant("only an exact path is told", "nearest", "0.75", "1.0",
           f"{PATHS}::test_an_unknown_path_is_told_which_there_are_and_which_was_meant"),
    Mutant("other users may read the API keys", "check_private", "0o077", "0",
           "tests/serve/test_serve_models.py::test_a_file_of_api_keys_that_others_can_read_is_refused"),
    Mutant("a panic of a tokenizer ends the request with a traceback", "panics_as_errors", '!= "PanicException"', '!= ""',
           f"{PARTS}::test_a_tokenizer_that_panics_is_told_in_one_line"),
]  # fmt: skip
