# SPDX-License-Identifier: Apache-2.0
.DEFAULT_GOAL := help
PY := .venv/bin/python
CODE := python cpu_engine lab benchmark test examples
.PHONY: help overhead setup wheel compat serve demo bench test test-all test-fast check fmt lock fuzz loom crash churn clean arm gpu-bundle gpu-check sim docs manifests modes pressure pd remote compare ranks soak deploy-check

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## everything that the other targets need; repeats only what changed
	@scripts/setup.sh

demo: setup ## real server, --dp 2, off against on; leaves build/demo/report.html; a first impression: make demo ARGS=--quick
	@$(PY) -m benchmark.demo $(ARGS)

serve: setup ## start the server for your own use on port 30000 (OpenAI-compatible), two ranks on the CPU
	@scripts/serve.sh $(ARGS)

test: setup ## style, unit, property, native, the real engine, an hour; some of them: make test ARGS=PATH
	@$(if $(ARGS),$(PY) -m pytest $(ARGS),scripts/test.sh)

test-all: setup ## the same, and stand-ins for GPUs, other programs, rarer modes: before a release, or where you changed one
	@scripts/test.sh --all

test-fast: setup ## the pure tests: seconds
	@$(PY) -m pytest test/unit test/lab test/property -q $(ARGS)

check: setup ## format, lint, types, import contracts, pure tests
	@.venv/bin/ruff format --check $(CODE)
	@.venv/bin/ruff check $(CODE)
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@cargo fmt --manifest-path sgl-kernel/Cargo.toml --all --check
	@cargo clippy -q --manifest-path sgl-kernel/Cargo.toml --workspace --all-targets --features banyan-py/ceiling -- -D warnings
	@$(PY) -m pytest test/unit test/lab test/property -q

fmt: setup ## format Python and Rust
	@.venv/bin/ruff check --fix -q $(CODE); .venv/bin/ruff format -q $(CODE)
	@cargo fmt --manifest-path sgl-kernel/Cargo.toml --all

bench: setup ## the published benchmark of sharing between ranks, half an hour: make bench DATA=sharegpt.jsonl.gz [ARGS="--num-prompts 500"]
	@$(PY) -m benchmark.demo --full $(if $(DATA),--dataset $(DATA)) $(ARGS)

overhead: setup ## what sharing costs where nothing is shared and steps take milliseconds; leaves build/overhead/report.html
	@$(PY) -m benchmark.overhead $(ARGS)

pd: setup ## a prefill and a decode server with and without Banyan; leaves build/pd/report.json: make pd ARGS=--quick, or --dual
	@$(PY) -m benchmark.pd $(ARGS)

remote: setup ## prefixes from another node against computing them, bytes against bare NIXL; leaves build/remote/report.json: make remote ARGS=--carriers, or "--faults 20"
	@$(PY) -m benchmark.remote $(ARGS)

compare: setup ## stock, SGLang's router, HiCache, LMCache and Banyan on the same work; build/compare: make compare DATA=FOLDER, or ARGS=--quick
	@$(PY) -m benchmark.alternatives $(if $(DATA),--data $(DATA)) $(ARGS)

ranks: setup ## 1, 2, 4 and 8 ranks, 1 to 16 requests a rank, on against off; leaves build/ranks/report.json
	@$(PY) -m benchmark.ranks $(ARGS)

sim: setup ## studies of the simulator (about twenty minutes); tables here, pictures in build/sim
	@for study in cache-compute pd-ratio tutti cost break-even h20 dp dualpath rates; do \
	    $(PY) -m banyan.cli sim $$study --plot build/sim $(ARGS) || exit 1; done

modes: setup ## start SGLang in every mode, with tiny models: who is served, who refused; build/modes/report.json
	@$(PY) -m benchmark.modes --write-docs $(ARGS)

recipes: setup ## published launch lines with Banyan, judged by dry runs: make recipes DATA=FOLDER [ARGS=--write-docs]
	@$(PY) -m benchmark.recipes $(if $(DATA),--data $(DATA)) $(ARGS)

pressure: setup ## a model of hits when the working set exceeds the pools (minutes): make pressure DATA=FOLDER
	@$(PY) -m benchmark.pressure.study $(if $(DATA),--data $(DATA)) $(ARGS)

loom: setup ## model-check the lease protocol
	@$(PY) -m pytest test/native/test_loom.py -q

fuzz: setup ## changed messages to every reader, what property tests draw, then requests to a server: make fuzz INPUTS=1000000 EXAMPLES=1000 FUZZ_SECONDS=300
	@$(PY) -m benchmark.byte_fuzz --inputs $(or $(INPUTS),1000000)
	@EXAMPLES=$(or $(EXAMPLES),1000) $(PY) -m pytest -q --hypothesis-profile=fuzz --hypothesis-seed=random --timeout=0 \
	    $$(grep -rl '^from hypothesis' test/property test/native test/sglang_plugin test/unit test/lab --include='test_*.py')
	@$(PY) -m benchmark.http_fuzz --seconds $(or $(FUZZ_SECONDS),300) $(ARGS)

gpu-check: ## prove the GPU path on a machine with a CUDA GPU, in steps: make gpu-check [STEPS='tests bench']; results in build/gpu
	@scripts/gpu_check.sh $(STEPS)

arm: ## build the native core for Arm hosts and run its tests in an emulator
	@scripts/arm.sh

gpu-bundle: setup ## pack gpu-check, the native core, tiny models and packages into one file for a machine without a package index
	@PYTHONPATH=.:python $(PY) test/gpu/bundle.py $(FILE)

crash: setup ## kill -9, power cuts and lying devices against the store: make crash SEEDS=1000, or SEED=n
	@$(PY) scripts/harness.py crash $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000))

soak: setup ## traffic of all kinds, faults and commands on a server that shares, tokens compared; leaves build/soak/report.html: make soak MINUTES=60
	@$(PY) -m benchmark.soak --minutes $(or $(MINUTES),60) $(ARGS)

churn: setup ## two writers fill one store over and over; disk, files and memory stay within bounds: make churn SECONDS=240
	@$(PY) scripts/churn.py --seconds $(or $(SECONDS),240)

docs: setup ## write the parts of the documentation that are made from code, and the site; leaves build/site
	@$(PY) scripts/docs.py
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

manifests: ## deploy/kubernetes from the chart, validated on the way, other values too; needs helm
	@scripts/manifests.sh

deploy-check: setup ## the chart at a real API server, its containers in a runtime, probes, an upgrade; says what this machine cannot
	@scripts/deploy_check.sh $(ARGS)

wheel: setup ## build the wheel for an SGLang environment of your own; leaves build/dist
	@scripts/wheel.sh

compat: setup ## which patches another release of SGLang changes, without installing it: make compat SGLANG=0.5.24
	@$(PY) scripts/compat.py $(if $(SGLANG),$(SGLANG),$(error name a release: make compat SGLANG=0.5.24))

lock: ## pin the newest versions that satisfy requirements/cpu.in
	.venv/bin/uv pip compile -q --upgrade --no-header --no-emit-index-url --no-annotate --python-version 3.11 \
	    --override requirements/cpu.overrides requirements/cpu.in -o requirements/cpu.lock

clean: ## remove builds and reports, keep .venv and the model
	rm -rf sgl-kernel/target
	[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name models ! -name setup -exec rm -rf {} +
