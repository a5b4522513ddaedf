# Banyan on upstream's GPU image. From the repository's root:
#     docker build -f deploy/docker/gpu.Dockerfile -t banyan:gpu .
# SGLANG_IMAGE must hold the release of SGLang that this release of Banyan is for; the build fails where it does not.
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23

FROM rust:1.90-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv tini && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir "maturin>=1.9,<2" ziglang==0.17.1
WORKDIR /src
COPY . .
ENV PATH=/venv/bin:$PATH
RUN maturin build --release --strip --zig --compatibility manylinux_2_28 --out /dist

FROM ${SGLANG_IMAGE}
COPY --from=wheel /dist /tmp/dist
COPY --from=wheel /usr/bin/tini-static /usr/bin/tini
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# What the wheel depends on comes with SGLang, these two perhaps aside; SGLang itself must stay as the image has it.
RUN python3 -m pip install --no-cache-dir rich==15.0.0 shtab==1.13.0 && \
    python3 -m pip install --no-cache-dir --no-deps /tmp/dist/*.whl && \
    python3 -c "import banyan, importlib.metadata as m; assert m.version('sglang') == banyan.SGLANG_VERSION" && \
    banyan --help && \
    rm -rf /tmp/dist
EXPOSE 30000
# Python as the first process of a container would miss a SIGTERM that comes before SGLang looks for it, and cannot kill
# itself as SGLang does when a rank has died.
ENTRYPOINT ["tini", "--", "python3", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--port", "30000", "--enable-banyan"]
