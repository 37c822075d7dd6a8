# Every node that trains: head, student ranks, toy and Hugging Face engines. Build from the checkout:
#   docker build -f docker/trainer.Dockerfile -t miniverl-dist/trainer:0.1.0 .
# Without a GPU (docker/compose.yaml does it):
#   docker build -f docker/trainer.Dockerfile --build-arg BASE=ubuntu:24.04 --build-arg GPU=0 .
# Python 3.12 as in the engine image: Ray wants one Python version on all nodes of a cluster.
ARG BASE=nvidia/cuda:13.0.3-cudnn-devel-ubuntu24.04
FROM ${BASE}

# KubeRay probes with wget and starts nodes with bash.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bash build-essential ca-certificates python3.12 python3.12-dev python3.12-venv wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 miniverl \
    && mkdir -p /opt/miniverl/source /runs \
    && chown -R miniverl /opt/miniverl /runs \
    && echo 'export PATH=/opt/miniverl/venv/bin:$PATH' > /etc/profile.d/miniverl.sh

USER miniverl
ENV PATH=/opt/miniverl/venv/bin:${PATH} \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHON=python \
    PYTHONUNBUFFERED=1
RUN python3.12 -m venv /opt/miniverl/venv
WORKDIR /opt/miniverl/source

# In the order of how seldom they change. TORCH_INDEX: the package index of another torch build.
ARG TORCH_INDEX=
COPY --chown=miniverl scripts scripts
RUN TORCH_INDEX="${TORCH_INDEX}" sh scripts/install_torch.sh
# Transformer Engine compiles its torch extension against the torch that is installed.
ARG GPU=1
RUN if [ "${GPU}" = 1 ]; then \
        python -m pip install setuptools==84.2.1 wheel==0.48.0 pybind11==3.1.0 ninja==1.13.2 \
        && MAX_JOBS=8 python -m pip install --no-build-isolation -r scripts/lock/gpu.txt; \
    fi
COPY --chown=miniverl pyproject.toml README.md ./
COPY --chown=miniverl miniverl_dist miniverl_dist
COPY --chown=miniverl rollout_server rollout_server
COPY --chown=miniverl teacher_server teacher_server
COPY --chown=miniverl actors actors
RUN python -m pip install --constraint scripts/lock/constraints.txt '.[local,ray]' 'ray[default]==2.60.0' \
    && sh scripts/install_bfcl.sh \
    && sh scripts/install_megatron.sh
COPY --chown=miniverl configs configs
COPY --chown=miniverl docker docker

# No Ray Serve here: draining it on SIGTERM would only delay the end (docker/node.sh stops the jobs).
ENV RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 \
    RAY_JOB_STOP_WAIT_TIME_S=300 \
    MINIVERL_RUNS=/runs
VOLUME /runs
# 6379 GCS, 8265 job server and dashboard, 8080 metrics
EXPOSE 6379 8265 8080
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=6 CMD ["ray", "health-check"]
ENTRYPOINT ["sh", "docker/node.sh"]
CMD ["head"]
