# The gateway's image: a virtual environment and its bytecode on a slim Python, and no load tester.
#   docker build -t vllm-batching-gateway .
# The base has a digest, as tags move (docs/image.md). Any other with python3 (3.11 or later) and CA certificates will do:
# --build-arg BASE_IMAGE=... The builder has the same Python with its venv module and headers: --build-arg BUILDER_IMAGE=...
# Without compiled modules (docs/builds.md): --build-arg GATEWAY_PURE=1
# Backends from DNS or Kubernetes, and tokenizers of models for exact routing:
#   --build-arg EXTRAS='coordination discovery kubernetes otel tokenizer'
# A package index of one's own: --secret id=pip.conf,src=$HOME/.config/pip/pip.conf
ARG BASE_IMAGE=python:3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b
ARG BUILDER_IMAGE=${BASE_IMAGE}

FROM ${BUILDER_IMAGE} AS builder
ENV PIP_CONFIG_FILE=/run/secrets/pip.conf \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN command -v gcc || { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev; }
# pip lives in an environment of its own, so that the one that is shipped has none
RUN python3 -m venv /opt/installer && python3 -m venv --without-pip /opt/gateway
WORKDIR /src

# dependencies first: they change less often than the code. Wheels only, of known hashes: nothing else is compiled
COPY deploy/image/*.lock ./locks/
ARG EXTRAS=
RUN --mount=type=secret,id=pip.conf \
    for name in base ${EXTRAS}; do set -- "$@" -r "locks/${name}.lock"; done && \
    /opt/installer/bin/pip install --require-hashes --no-deps --only-binary :all: -r locks/build.lock && \
    /opt/installer/bin/pip --python /opt/gateway/bin/python install --require-hashes --no-deps --only-binary :all: \
      --no-compile "$@"

COPY pyproject.toml README.md LICENSE* hatch_build.py ./
COPY gateway ./gateway
ARG GATEWAY_PURE=0
RUN --mount=type=secret,id=pip.conf \
    /opt/installer/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . && \
    /opt/installer/bin/pip --python /opt/gateway/bin/python install --no-deps --no-compile \
      --no-index --find-links /tmp/wheel vllm-batching-gateway && \
    rm /opt/gateway/bin/loadtest && \
    /opt/installer/bin/cyclonedx-py environment --output-reproducible -o /opt/gateway/sbom.cdx.json \
      /opt/gateway/bin/python

# No tests of the packages. Bytecode of all that is installed, and of what it imports from the standard library (slim bases carry none):
# the final image cannot write any, and would compile at every start and every health check.
# unchecked-hash: valid whatever a copy does to the files' times
WORKDIR /
ENV PYTHONPYCACHEPREFIX=/opt/bytecode
RUN find /opt/gateway/lib -type d -name tests -prune -exec rm -rf {} + && \
    /opt/gateway/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/gateway/lib && \
    /opt/gateway/bin/python -c "import gateway.__main__, gateway.app, gateway.cli.check, gateway.cli.client, gateway.cli.pages"

FROM ${BASE_IMAGE}
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="vllm-batching-gateway" \
      org.opencontainers.image.description="An OpenAI-compatible gateway in front of vLLM servers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=builder /opt/gateway /opt/gateway
COPY --from=builder /opt/bytecode /opt/bytecode
ENV PATH=/opt/gateway/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPYCACHEPREFIX=/opt/bytecode \
    PYTHONUNBUFFERED=1
# a number, so that Kubernetes can tell that it is not root; nothing in the image belongs to it
USER 10001:10001
EXPOSE 8080 8081 8082
HEALTHCHECK --interval=15s --timeout=5s --start-period=20s --retries=3 CMD ["gateway", "healthcheck", "-c", "/etc/gateway/gateway.yaml"]
# exec form: signals reach the gateway, which drains on SIGTERM
STOPSIGNAL SIGTERM
ENTRYPOINT ["gateway"]
CMD ["serve", "-c", "/etc/gateway/gateway.yaml"]
