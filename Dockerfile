# Image that trains with Penstock. TORCH_INDEX is the URL of an index of PyTorch builds for the CPU or for a CUDA version, from
# PyTorch's installation page; without it, pip's index decides, which for Linux means the CUDA build.
#   docker build --build-arg TORCH_INDEX=URL -t penstock .
FROM python:3.11-slim

ARG TORCH_INDEX=
ARG TORCH_VERSION=2.13.0

WORKDIR /opt/penstock
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch==${TORCH_VERSION}"
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY penstock penstock
COPY planner planner
COPY runtime runtime
COPY hwprofiles hwprofiles
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt && pip install --no-cache-dir -c /tmp/constraints.txt '.[run]'

# Mount data, models and runs here
WORKDIR /job
ENTRYPOINT ["penstock"]
CMD ["--help"]
