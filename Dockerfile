# docker build -t lightning-pfl .                                 # PyTorch's CPU build
# docker build -t lightning-pfl --build-arg TORCH=default .       # with CUDA's libraries
# docker run --rm -v "$PWD/runs:/app/runs" lightning-pfl fit --config quickstart
FROM python:3.12-slim

ARG TORCH=cpu
ARG UV=0.13.9

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir "uv==$UV"

WORKDIR /opt/lightning-pfl
COPY . .
RUN make install "TORCH=$TORCH" && rm -rf /root/.cache

ENV PATH=/opt/lightning-pfl/.venv/bin:$PATH
WORKDIR /app
ENTRYPOINT ["pfl"]
CMD ["--help"]
