#!/bin/sh
# llama.cpp's own server, compiled for this machine from the source that llama-cpp-python carries. Runs in the venv's
# folder with the venv's programs first; JOBS compilers at a time (2).
set -eu
pip download --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation --dest source llama-cpp-python==0.3.36
tar -xzf source/llama_cpp_python-0.3.36.tar.gz -C source --strip-components 1
cmake -S source/vendor/llama.cpp -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
	-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
cmake --build build --target llama-server --parallel "${JOBS:-2}"
cp build/bin/llama-server bin/
rm -rf source build
