# Two commands matter: `make demo` and `make test`. Both set everything up in .venv first, and only once.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 2

.PHONY: demo test page docs lint nightly gpu bench release clean
.DEFAULT_GOAL := demo

.venv/ready: pyproject.toml constraints.txt scripts/setup_venv.sh
	@sh scripts/setup_venv.sh "$(PYTHON)"

page: .venv/ready  ## build the page again, if its sources have changed
	@$(BIN)/python hatch_build.py

docs: .venv/ready page  ## the documentation's site, in site/
	@PYTHONPATH=scripts $(BIN)/python scripts/build_docs.py && echo "site/index.html"

demo: .venv/ready  ## build a small model and follow a token through it
	@$(BIN)/cutaway demo

test: .venv/ready page lint  ## everything that must hold
	@echo "tests, as a user runs it (compiled models, bad input):" && OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n 2 -m "unchecked and not nightly and not gpu"
	@echo "tests, shapes checked as they run:" && OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not unchecked and not nightly and not gpu"
	@echo "documentation, with the notebooks as they ran:" && PYTHONPATH=scripts $(BIN)/python scripts/build_docs.py && echo "site/index.html"

lint: .venv/ready
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check . && $(BIN)/mypy --no-error-summary && $(BIN)/python scripts/check_web_types.py && echo "lint and types: fine"

nightly: .venv/ready  ## the long suites
	@OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n 2 -m "unchecked and not gpu"
	@OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n 2 -m "not unchecked and not gpu"

gpu: .venv/ready  ## what only a GPU can show
	@JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -m gpu

bench: .venv/ready  ## side by side with peers
	@$(BIN)/python bench/forward_cpu.py

release: .venv/ready page  ## the sdist and the wheel, tried in an empty environment
	@$(BIN)/python scripts/build_release.py --fresh

clean:
	@rm -rf .venv .pages site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
