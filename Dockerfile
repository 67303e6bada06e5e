# Image that trains with Penstock. CPU build of PyTorch by default; for a GPU:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t penstock:cuda .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0

WORKDIR /opt/penstock
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH_VERSION}"
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
