# Main targets: `make demo` and `make test`. Both first create .venv if it does not exist.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 2
# The processes of a test run share compiled modules and pytest's rewritten assertions, whatever the environment sets.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test page docs lint nightly coverage gpu bench release clean
.DEFAULT_GOAL := demo

.venv/ready: pyproject.toml constraints.txt scripts/setup_venv.sh
	@sh scripts/setup_venv.sh "$(PYTHON)"

page: .venv/ready  ## build the web page if its sources have changed
	@$(BIN)/python hatch_build.py

docs: .venv/ready page  ## build the documentation site in site/
	@PYTHONPATH=scripts $(BIN)/python scripts/build_docs.py && echo "site/index.html"

demo: .venv/ready  ## train a small model and trace a token
	@$(BIN)/cutaway demo

test: .venv/ready page lint  ## lint, types and tests; durations of the slowest 20
	@echo "model and family tests, with runtime shape checks:" && OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations=20 -m "not unchecked and not nightly and not gpu" tests/model tests/families/tables
	@echo "all other tests:" && OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n 2 --durations=20 -m "not shape_checked and not nightly and not gpu"

lint: .venv/ready
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check . && $(BIN)/mypy --no-error-summary && $(BIN)/python scripts/check_web_types.py && echo "lint and types: passed"

nightly: .venv/ready docs  ## long test suites, and the documentation with all notebooks executed
	@OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n 2 -m "unchecked and not gpu"
	@OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n 2 -m "not unchecked and not gpu"

coverage: .venv/ready page  ## line and branch coverage of the tests: coverage.xml and a summary
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --cov --cov-report= -m "not unchecked and not nightly and not gpu" tests/model tests/families/tables
	@OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n 2 --cov --cov-append --cov-report=xml --cov-report=term:skip-covered -m "not shape_checked and not nightly and not gpu"

gpu: .venv/ready  ## GPU tests
	@JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -m gpu

bench: .venv/ready  ## compare with other libraries
	@$(BIN)/python bench/forward_cpu.py

release: .venv/ready page  ## build sdist and wheel and test them in an empty environment
	@$(BIN)/python scripts/build_release.py --fresh

clean:
	@rm -rf .venv .pages site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
