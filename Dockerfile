# megalite with PyTorch's build for NVIDIA GPUs:   docker build -t megalite .
# with the CPU build, gigabytes smaller:           docker build -t megalite --build-arg PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' .
FROM python:3.12-slim AS base
# Triton compiles its launchers with a C compiler on the machine that trains.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

FROM base
ARG PIP_FLAGS=
COPY . /megalite
RUN pip install --no-cache-dir $PIP_FLAGS -c /megalite/constraints.txt '/megalite[data,log,gpu]'
WORKDIR /work
ENTRYPOINT ["megalite"]
