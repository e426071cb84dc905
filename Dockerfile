# CUDA runtime for cloud GPUs; the image trains by itself:
#   docker build -t gpt2_ddp .
#   docker run --gpus all --ipc host -v $PWD/data:/app/data -v $PWD/runs:/app/runs gpt2_ddp \
#     --multi_gpu --num_processes 8 scripts/train_gpt2.py --config configs/gpt2_124m.yaml
# torch's wheels bring CUDA, cuDNN and NCCL; the base image only has to bring the driver's interface.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# gcc and the headers are for torch.compile, which builds its kernels' launchers when it first runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1001 trainer && mkdir /app && chown trainer /app
USER trainer
WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1

# The dependencies change seldom: a layer of their own, without the project itself.
COPY --chown=trainer requirements.txt ./
RUN python3 -m venv .venv \
    && grep -v '^-e' requirements.txt > dependencies.txt \
    && pip install --no-cache-dir -r dependencies.txt

COPY --chown=trainer . .
RUN pip install --no-cache-dir --no-deps -e . \
    && mkdir -p data runs
VOLUME ["/app/data", "/app/runs"]

# `accelerate launch`, with a PID 1 that lets the trainer save its checkpoint: docker stop -t 60
ENTRYPOINT ["docker/entrypoint.sh"]
CMD ["scripts/train_gpt2.py"]
