# What trains, and nothing that only builds it: docs/cloud.md says how it is built, run and checked.
# torch's wheels contain CUDA, cuDNN and NCCL; the driver comes from the host. The lock file is for Python 3.11.
ARG BASE=debian:bookworm-slim

# What pip's settings of the build machine name there: docker/build.sh replaces it.
FROM scratch AS pip

FROM ${BASE} AS system
# gcc and the headers are for torch.compile, which builds its kernels' launchers when it first runs. NCCL opens libibverbs
# and its drivers for InfiniBand and RoCE at run time; without them it uses TCP.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-dev python3-venv gcc g++ libc6-dev \
        libibverbs1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log

FROM system AS build
RUN python3 -m venv /opt/venv
# Dependencies have their own layer, since they change less often than the project. pip's settings of the build machine,
# and the files that they name, are mounted during the installation and stored in no layer.
COPY requirements.txt docker/requirements.lock /tmp/
# s3fs is for checkpoint.mirror.
RUN --mount=type=secret,id=pip --mount=type=secret,id=ca --mount=type=bind,from=pip,target=/run/pip \
    grep -v '^-e' /tmp/requirements.txt > /tmp/dependencies.txt \
    && PIP_CONFIG_FILE=/run/secrets/pip /opt/venv/bin/pip install --no-cache-dir \
        --requirement /tmp/dependencies.txt s3fs --constraint /tmp/requirements.lock

FROM system
# HOME and compiled kernels are in /tmp, which may be the only writable folder besides the volumes. Downloads from the Hub
# are too large for it. Any uid works, also with `--user`: no program needs its name.
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor HF_HOME=/app/data/huggingface
RUN useradd --no-create-home --home-dir /tmp --uid 1001 trainer \
    && install -d -o trainer -g trainer /app/data /app/runs
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY LICENSE ./
COPY docker/entrypoint.sh docker/health.sh docker/
COPY cloud/launch.sh cloud/
COPY configs configs
COPY scripts scripts
COPY gpt2_ddp gpt2_ddp
RUN python -m compileall -q gpt2_ddp
ARG REVISION=unknown
LABEL org.opencontainers.image.title="gpt2_ddp" \
    org.opencontainers.image.description="GPT-2 pretraining on HuggingFace Accelerate" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="${REVISION}"
USER 1001:1001
VOLUME ["/app/data", "/app/runs"]

# Reads the state only. A training without progress is unhealthy; an ended run, or none, is healthy.
HEALTHCHECK --interval=2m --timeout=30s --start-period=5m \
    CMD ! python scripts/status.py runs/* 2>/dev/null | grep ' stalled '
ENTRYPOINT ["docker/entrypoint.sh"]
CMD ["scripts/train_gpt2.py"]
