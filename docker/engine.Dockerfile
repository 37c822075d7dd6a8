# Nodes that serve: SGLang engines of the rollout pool, or a teacher. Build from the checkout:
#   docker build -f docker/engine.Dockerfile -t miniverl-dist/engine:0.1.0 .
# A teacher alone: docker run --gpus all --entrypoint python3 miniverl-dist/engine:0.1.0 \
#   -m sglang.launch_server --model-path MODEL --host 0.0.0.0 --port 30000
# The base brings Python 3.12, CUDA 13, torch and SGLang's kernels: none of them is replaced.
FROM lmsysorg/sglang:v0.5.23

RUN useradd --create-home --uid 10001 miniverl \
    && mkdir -p /opt/miniverl/source /runs \
    && chown -R miniverl /opt/miniverl /runs
WORKDIR /opt/miniverl/source
COPY pyproject.toml README.md ./
COPY miniverl_dist miniverl_dist
COPY rollout_server rollout_server
COPY teacher_server teacher_server
COPY actors actors
COPY scripts scripts
# What the base holds stays as it is. Fails when that is another SGLang than the one that the client
# was written against.
RUN python3 -m pip freeze --exclude-editable | grep == > /tmp/base.txt \
    && python3 -m pip install --no-cache-dir --break-system-packages --constraint /tmp/base.txt \
        . 'ray[default]==2.60.0' \
    && PYTHON=python3 PIP_BREAK_SYSTEM_PACKAGES=1 sh scripts/install_bfcl.sh \
    && python3 -c 'from importlib.metadata import version as v; assert v("sglang") == "0.5.23", v("sglang")'
COPY docker docker

USER miniverl
ENV PYTHONUNBUFFERED=1 \
    RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 \
    MINIVERL_RUNS=/runs
VOLUME /runs
EXPOSE 8080 30000
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=6 CMD ["ray", "health-check"]
ENTRYPOINT ["sh", "docker/node.sh"]
CMD ["worker", "head:6379"]
