/* test_find_nccl.c - tools/find_nccl.sh with made-up toolkits and libraries: a shell script for
   nvcc, headers of a few lines, libraries of one function. Needs neither CUDA nor NCCL.

   SPDX-License-Identifier: MIT */
#define TAGS NO(ASAN) | SLOW
#include "harness.h"

enum { OUTPUT_NBYTES = 1 << 14 };
static char output[OUTPUT_NBYTES]; /* both streams of the script */

/* Functions for the `made` of a case, in the test's directory, which is $T.
   cuda DIR                       a toolkit
   nccl DIR HEADER LIBRARY FILE   an NCCL of these versions; FILE is the library's name
   cublas INCLUDE LIB FILE        a cuBLAS
   archs NUMBER...                of the toolkit in $T/cuda, which is 12.4
   command NAME TEXT              a command of the test, before all others in PATH */
static const char prelude[] =
    "set -e; cd \"$T\"; mkdir -p bin\n"
    "command() { printf '#!/bin/sh\\n%s\\n' \"$2\" >bin/$1; chmod +x bin/$1; }\n"
    "shared() { cc -shared -fPIC -Wl,-soname,$2 -x c -o $1 -; }\n"
    "cuda() {\n"
    "    mkdir -p $1/bin $1/include $1/lib64\n"
    "    printf '#!/bin/sh\\necho release 13.0, V13.0.88\\n' >$1/bin/nvcc; chmod +x $1/bin/nvcc\n"
    "    echo 'int cudaRuntimeGetVersion(int *v);' >$1/include/cuda_runtime_api.h\n"
    "    echo '#include \"cuda_runtime_api.h\"' >$1/include/cuda_runtime.h\n"
    "    echo 'int cudaRuntimeGetVersion(int *v) { return *v = 13000, 0; }' |\n"
    "        shared $1/lib64/libcudart.so libcudart.so\n"
    "}\n"
    "nccl() {\n"
    "    mkdir -p $1/include $1/lib\n"
    "    printf '%s\\n' '#include <cuda_runtime.h>' \"#define NCCL_VERSION_CODE $2\" \\\n"
    "        'enum { ncclSuccess };' 'int ncclGetVersion(int *v);' >$1/include/nccl.h\n"
    "    echo \"int ncclGetVersion(int *v) { return *v = $3, 0; }\n"
    "          const char made_for[] = \\\"NCCL version 2.1.1+cuda${5-13.0}\\\";\" |\n"
    "        shared $1/lib/$4 $4\n"
    "}\n"
    "cublas() {\n"
    "    mkdir -p $1 $2\n"
    "    printf '%s\\n' 'enum { CUBLAS_STATUS_SUCCESS };' \\\n"
    "        'const char *cublasGetStatusString(int status);' >$1/cublas_v2.h\n"
    "    echo 'const char *cublasGetStatusString(int s) { return s ? \"\" : \"ok\"; }' |\n"
    "        shared $2/$3 $3\n"
    "}\n"
    "archs() { printf '#!/bin/sh\\ncase $1 in --list*) printf \"%s\" ;; --help) echo \"--threads "
    "n\" ;; *) echo release 12.4 ;;'\\\n"
    "' esac\\n' \"$(printf 'compute_%s\\\\n' \"$@\")\" >cuda/bin/nvcc; }\n"
    "command python3 'exit 1'; command pkg-config 'exit 1'; cuda cuda\n";

/* Runs bash with T set. Returns its exit status. */
static int shell(const char *format, ...) H_PRINTF(1, 2);
static int shell(const char *format, ...) {
    char command[OUTPUT_NBYTES];
    va_list args;
    va_start(args, format);
    CHECK(vsnprintf(command, sizeof command, format, args) < (int)sizeof command);
    va_end(args);
    setenv("T", h_tmpdir(), 1);
    setenv("FSDP_SCRIPT", command, 1);
    FILE *p = popen("bash -c \"$FSDP_SCRIPT\" 2>&1", "r");
    CHECK(p != NULL);
    output[fread(output, 1, sizeof output - 1, p)] = 0;
    const int status = pclose(p);
    printf("%s", output);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void make(const char *made) {
    if (shell("command -v cc")) SKIP("no cc");
    CHECK_MSG(shell("%s%s", prelude, made) == 0, "%s", output);
}

/* Runs the script with these variables in the environment. */
static int find(const char *variables, const char *options) {
    return shell("env -u CUDA_HOME -u CUDA_PATH -u NCCL_HOME -u NCCL_ROOT -u CONDA_PREFIX -u CC "
                 "-u PYTHON -u LD_LIBRARY_PATH -u LIBRARY_PATH -u CPATH "
                 "PATH=\"$T/bin:$PATH\" %s tools/find_nccl.sh %s",
                 variables, options);
}

/* Checks that the output has this text, in which $T is the test's directory. */
static void check_has(const char *word) {
    char text[1000];
    size_t n = 0;
    for (const char *at = word; *at && n < sizeof text - 320; at++) {
        int is_place = at[0] == '$' && at[1] == 'T';
        n += (size_t)snprintf(text + n, sizeof text - n, "%.*s", is_place ? 320 : 1,
                              is_place ? h_tmpdir() : at);
        at += is_place;
    }
    CHECK_MSG(strstr(output, text) != NULL, "expected '%s' in: %s", text, output);
}

#define HOME "CUDA_HOME=\"$T/cuda\" "

/* ---- places ---------------------------------------------------------------------------------- */

static const struct {
    const char *name, *made, *variables, *words[4];
} places[] = {
    {"CUDA_HOME,NCCL_HOME",
     "nccl nccl 22809 22809 libnccl.so",
     HOME "NCCL_HOME=\"$T/nccl\"",
     {"NVCC = $T/cuda/bin/nvcc\n", "NCCL_FLAGS = -isystem $T/nccl/include\n",
      "-lnccl -Wl,-rpath,$T/nccl/lib\n", "# NCCL 2.28.9 for CUDA 13.0"}},
    {"CUDA_PATH,NCCL_ROOT",
     "nccl nccl 21800 23007 libnccl.so",
     "CUDA_PATH=\"$T/cuda\" NCCL_ROOT=\"$T/nccl\"",
     {"CUDA_LIBS = -L$T/cuda/lib64 -lcudart -Wl,-rpath,", "# NCCL 2.30.7", "header 2.18.0",
      "(NCCL_ROOT="}},
    {"nvcc_in_PATH",
     "nccl nccl 22304 22304 libnccl.so; ln -s \"$T/cuda/bin/nvcc\" bin/nvcc",
     "NCCL_HOME=\"$T/nccl\"",
     {"NVCC = $T/cuda/bin/nvcc\n", "CUDA 13.0", "(nvcc in PATH", "NCCL 2.23.4"}},
    {"wheel", // has no libnccl.so
     "nccl wheel 22809 22809 libnccl.so.2\n"
     "command python3 'case $2 in *nvidia.nccl*) echo \"$T/wheel\" ;; *) exit 1 ;; esac'",
     HOME,
     {"NCCL_LIBS = -L$T/wheel/lib -l:libnccl.so.2 -Wl,-rpath,$T/wheel/lib\n", "(wheel of python3",
      "NCCL_FLAGS = -isystem $T/wheel/include\n", "NCCL 2.28.9"}},
    {"pkg-config",
     "nccl system 22703 22703 libnccl.so\n"
     "command pkg-config 'case $* in\n"
     "--exists*) ;; *includedir*) echo $T/system/include ;; *) echo $T/system/lib ;; esac'",
     HOME,
     {"-L$T/system/lib -lnccl", "(pkg-config nccl)", "NCCL 2.27.3", "-isystem $T/system/include"}},
    {"conda",
     "nccl conda 22809 22809 libnccl.so.2",
     HOME "CONDA_PREFIX=\"$T/conda\"",
     {"-L$T/conda/lib -l:libnccl.so.2", "(CONDA_PREFIX=", "NCCL 2.28.9", "CUBLAS_LIBS = \n"}},
    {"beside_CUDA",
     "nccl cuda 22809 22809 libnccl.so; mv cuda/lib/libnccl.so cuda/lib64/libnccl.so.2\n"
     "ln -s libnccl.so.2 cuda/lib64/libnccl.so",
     HOME,
     {"NCCL_FLAGS = \n", "NCCL_LIBS = -lnccl\n", "(beside CUDA", "NCCL 2.28.9"}},
    {"broken_wheel_is_passed_over",
     "nccl wheel 22809 22809 libnccl.so.2; rm wheel/lib/*; nccl conda 22809 22809 libnccl.so.2\n"
     "command python3 'case $2 in *nvidia.nccl*) echo \"$T/wheel\" ;; *) exit 1 ;; esac'",
     HOME "CONDA_PREFIX=\"$T/conda\"",
     {"-L$T/conda/lib", "(CONDA_PREFIX=", "NCCL 2.28.9", "NVCC = "}},
    {"cuda_of_another_major_is_reported",
     "nccl nccl 22809 22809 libnccl.so 12.9",
     HOME "NCCL_HOME=\"$T/nccl\"",
     {"warning: this NCCL was made for CUDA 12.9, the toolkit is 13.0", "for CUDA 12.9",
      "NVCC = ", "no cuBLAS was found: the GPT in CUDA is left out"}},
    {"cuBLAS_of_a_wheel", // and code for the architectures of the toolkit
     "nccl nccl 22809 22809 libnccl.so; cublas blas/include blas/lib libcublas.so.12\n"
     "command python3 'case $2 in *nvidia.cublas*) echo \"$T/blas\" ;; *) exit 1 ;; esac'\n"
     "archs 75 80 86 90",
     HOME "NCCL_HOME=\"$T/nccl\"",
     {"CUBLAS_FLAGS = -isystem $T/blas/include\n", "# cuBLAS: $T/blas\n",
      "CUBLAS_LIBS = -L$T/blas/lib -l:libcublas.so.12 -Wl,-rpath,$T/blas/lib\n",
      "NVCC_ARCH ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 "
      "-gencode arch=compute_90,code=compute_90\n"}},
    {"HPC_SDK", // nvcc is apart from its toolkit, and so are the libraries
     "mkdir -p sdk/compilers/bin sdk/cuda; mv cuda sdk/cuda/13.0\n"
     "mv sdk/cuda/13.0/bin/nvcc sdk/compilers/bin; ln -s 13.0/include 13.0/lib64 sdk/cuda\n"
     "ln -s \"$T/sdk/compilers/bin/nvcc\" bin/nvcc\n"
     "nccl sdk/comm_libs/13.0/nccl 22809 22809 libnccl.so\n"
     "cublas sdk/math_libs/13.0/targets/x/include sdk/math_libs/13.0/targets/x/lib libcublas.so",
     "",
     {"# CUDA 13.0: $T/sdk/compilers/../cuda (HPC SDK, $T/sdk/compilers)", "(HPC SDK, ",
      "/comm_libs/13.0/nccl/lib -lnccl", "/math_libs/13.0/targets/x/include\n"}},
    {"conda_has_all",
     "mkdir -p conda/targets/x; mv cuda/bin conda; mv cuda/include cuda/lib64 conda/targets/x\n"
     "mv conda/targets/x/lib64 conda/targets/x/lib; nccl conda 22809 22809 libnccl.so\n"
     "cublas conda/targets/x/include conda/targets/x/lib libcublas.so\n"
     "ln -s \"$T/conda/bin/nvcc\" bin/nvcc",
     "CONDA_PREFIX=\"$T/conda\"",
     {"CUDA_FLAGS = -isystem $T/conda/targets/x/include\n", "CUDA_LIBS = -L$T/conda/targets/x/lib",
      "CUBLAS_FLAGS = \n", "CUBLAS_LIBS = -L$T/conda/targets/x/lib -lcublas"}},
};

TEST_P(find_nccl, finds, places) {
    make(row->made);
    CHECK_EQ_INT(find(row->variables, ""), 0);
    for (size_t i = 0; i < 4; i++) check_has(row->words[i]);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static const struct {
    const char *name, *made, *variables, *words[3];
} refusals[] = {
    {"no_toolkit",
     "",
     "CUDA_HOME=/nowhere/cuda",
     {"/nowhere/cuda: no such directory", "unset it", "Install one: the package cuda-toolkit"}},
    {"no_nvcc", "rm cuda/bin/nvcc", HOME, {"no bin/nvcc", "No CUDA toolkit", "CUDA_HOME=DIR"}},
    {"no_cuda_headers",
     "rm cuda/include/cuda_runtime_api.h",
     HOME,
     {"no include/cuda_runtime_api.h", "No CUDA toolkit", "Install one"}},
    {"no_cudart", "rm cuda/lib64/*", HOME, {"no libcudart.so", "No CUDA toolkit", "Install one"}},
    {"nvcc_fails",
     "printf '#!/bin/sh\\necho error: unsupported compiler; exit 1\\n' >cuda/bin/nvcc",
     HOME,
     {"nvcc does not compile: error: unsupported compiler", "No CUDA toolkit", "Install one"}},
    {"cudart_does_not_link",
     "echo 'int x;' | shared cuda/lib64/libcudart.so libcudart.so",
     HOME,
     {"a program is not linked, or does not run", "cudaRuntimeGetVersion", "No CUDA toolkit"}},
    {"no_nccl_there",
     "",
     HOME "NCCL_HOME=/nowhere/nccl",
     {"NCCL_HOME=/nowhere/nccl: no nccl.h in", "unset it", "apt-get install libnccl-dev"}},
    {"no_library",
     "nccl nccl 22809 22809 libnccl.so; rm nccl/lib/libnccl.so",
     HOME "NCCL_HOME=\"$T/nccl\"",
     {"no libnccl.so.2 in $T/nccl/lib", "NCCL 2.18.0 or newer", "nvidia-nccl-cu13"}},
    {"too_old",
     "nccl nccl 21703 21703 libnccl.so",
     HOME "NCCL_HOME=\"$T/nccl\"",
     {"2.17.3 (header) and 2.17.3 (library), older than 2.18.0", "No NCCL", "NCCL_HOME=DIR"}},
    {"header_is_newer",
     "nccl nccl 22809 22703 libnccl.so",
     HOME "NCCL_HOME=\"$T/nccl\"",
     {"its header, 2.28.9, is newer than the library that the program loads, 2.27.3",
      "($T/nccl/lib/libnccl.so", "No NCCL"}},
    {"does_not_link",
     "nccl nccl 22809 22809 libnccl.so; echo 'int x;' | shared nccl/lib/libnccl.so libnccl.so",
     HOME "NCCL_HOME=\"$T/nccl\"",
     {"the probe is not compiled or linked", "ncclGetVersion", "No NCCL"}},
    {"does_not_run",
     "nccl nccl 22809 22809 libnccl.so\n"
     "echo 'int ncclGetVersion(int *v) { return *v = 1; }' | shared nccl/lib/libnccl.so "
     "libnccl.so",
     HOME "NCCL_HOME=\"$T/nccl\"",
     {"the probe does not run", "$T/nccl", "No NCCL"}},
};

TEST_P(find_nccl, refuses, refusals) {
    make(row->made);
    CHECK_EQ_INT(find(row->variables, ""), 1);
    for (size_t i = 0; i < 3; i++) check_has(row->words[i]);
    CHECK_MSG(strstr(output, "NVCC =") == NULL, "%s", output);
}

/* A newer patch level in the header does not matter. */
TEST(find_nccl, patch_level) {
    make("nccl nccl 22809 22803 libnccl.so");
    CHECK_EQ_INT(find(HOME "NCCL_HOME=\"$T/nccl\"", ""), 0);
    check_has("# NCCL 2.28.3");
}

TEST(find_nccl, prints_all_places) {
    make("nccl wheel 21703 21703 libnccl.so.2\n"
         "nccl cuda 21500 21500 libnccl.so; mv cuda/lib/libnccl.so cuda/lib64\n"
         "command python3 'case $2 in *nvidia.nccl*) echo \"$T/wheel\" ;; *) exit 1 ;; esac'");
    CHECK_EQ_INT(find(HOME "CONDA_PREFIX=/nowhere/conda", ""), 1);
    check_has("pkg-config nccl: not known");
    check_has("wheel of python3, $T/wheel: is of version 2.17.3");
    check_has("CONDA_PREFIX=/nowhere/conda: no nccl.h in /nowhere/conda/include");
    check_has("beside CUDA or where cc looks: is of version 2.15.0");
}

/* ---- a GPU ----------------------------------------------------------------------------------- */

/* gpu COUNT ERROR: result of cudaGetDeviceCount in $T/cuda. */
static const char gpu[] =
    "nccl nccl 22809 22809 libnccl.so\n"
    "gpu() {\n"
    "    printf '%s\\n' 'int cudaRuntimeGetVersion(int *v) { return *v = 13000, 0; }' \\\n"
    "        \"int cudaGetDeviceCount(int *n) { return *n = $1, $2; }\" \\\n"
    "        'int cudaFree(void *ptr) { return ptr != 0; }' \\\n"
    "        'int cudaDeviceGetAttribute(int *v, int a, int d) { return *v = a + d, 0; }' \\\n"
    "        'const char *cudaGetErrorString(int e) { return e == 35 ? \"old driver\" : \"\"; }' "
    "|\n"
    "        shared cuda/lib64/libcudart.so libcudart.so\n"
    "    sed 's/ {/;/' >>cuda/include/cuda_runtime_api.h <<'end'\n"
    "typedef int cudaError_t;\n"
    "enum\n{ cudaSuccess, cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };\n"
    "int cudaGetDeviceCount(int *n) {\n"
    "int cudaFree(void *ptr) {\n"
    "int cudaDeviceGetAttribute(int *v, int a, int d) {\n"
    "const char *cudaGetErrorString(int e) {\n"
    "end\n"
    "}\n"
    "command nvidia-smi 'echo no devices were found'\n";

static const struct {
    const char *name, *call, *word;
    int status;
} gpus[] = {
    {"two", "gpu 2 0", "GPU 1: compute capability 2.3\n", 0},
    {"none", "gpu 0 0", "cudaGetDeviceCount: 0: nvidia-smi says: no devices were found\n", 1},
    {"no_driver", "gpu 0 35", "cudaGetDeviceCount: old driver: nvidia-smi says: no devices", 1},
};

TEST_P(find_nccl, gpu, gpus) {
    char made[4096];
    snprintf(made, sizeof made, "%s%s\n", gpu, row->call);
    make(made);
    CHECK_EQ_INT(find(HOME "NCCL_HOME=\"$T/nccl\"", "-g -o \"$T/nccl.mk\""), row->status);
    check_has(row->word);
    CHECK((strstr(output, "No GPU was found") != NULL) == row->status);
    CHECK_EQ_INT(find(HOME "NCCL_HOME=\"$T/nccl\"", ""), 0); // a build needs none
}

/* If there are GPUs, code is made for them only, on all cores. */
TEST(find_nccl, code_for_the_gpus_that_are_here) {
    char made[4096];
    snprintf(made, sizeof made, "%sarchs 12 23 80; gpu 2 0\n", gpu);
    make(made);
    CHECK_EQ_INT(find(HOME "NCCL_HOME=\"$T/nccl\"", "-g"), 0);
    check_has("NVCC_ARCH ?= -gencode arch=compute_12,code=sm_12 "
              "-gencode arch=compute_23,code=sm_23 -gencode arch=compute_23,code=compute_23\n");
    check_has("NVCC_JOBS = --threads 0 \n");
    CHECK_EQ_INT(find(HOME "NCCL_HOME=\"$T/nccl\"", ""), 0);
    check_has("NVCC_ARCH ?= -gencode arch=compute_80,code=sm_80 ");
}

/* ---- the output file ------------------------------------------------------------------------- */

/* Written once, unchanged if nothing has changed, and unchanged by a failure. */
TEST(find_nccl, file) {
    make("nccl nccl 22809 22809 libnccl.so");
    CHECK_EQ_INT(find(HOME "NCCL_HOME=\"$T/nccl\"", "-o \"$T/out/nccl.mk\""), 0);
    check_has("CUDA 13.0: $T/cuda");
    CHECK(strstr(output, "NVCC =") == NULL && strchr(output, '#') == NULL);
    CHECK_EQ_INT(shell("cd \"$T\"; touch -d @1000 out/nccl.mk; cat out/nccl.mk"), 0);
    check_has("NVCC = $T/cuda/bin/nvcc\n");
    CHECK_EQ_INT(find(HOME "NCCL_HOME=\"$T/nccl\"", "-o \"$T/out/nccl.mk\""), 0);
    CHECK_EQ_INT(find("CUDA_HOME=/nowhere", "-o \"$T/out/nccl.mk\""), 1);
    CHECK_EQ_INT(shell("stat -c %%Y \"$T/out/nccl.mk\""), 0);
    CHECK_EQ_STR(output, "1000\n");
    make("nccl nccl 22810 22810 libnccl.so");
    CHECK_EQ_INT(find(HOME "NCCL_HOME=\"$T/nccl\"", "-o \"$T/out/nccl.mk\""), 0);
    CHECK_EQ_INT(shell("cat \"$T/out/nccl.mk\""), 0);
    check_has("NCCL 2.28.10");
    /* make reads it as it is */
    CHECK_EQ_INT(shell("printf 'include %%s/out/nccl.mk\\nall:;@echo $(NVCC)!$(NCCL_LIBS)\\n' "
                       "\"$T\" | make -s -f -"),
                 0);
    check_has("$T/cuda/bin/nvcc!-L$T/nccl/lib -lnccl");
}

TEST(find_nccl, usage) {
    CHECK_EQ_INT(find("", "-x"), 2);
    check_has("usage: find_nccl.sh [-g] [-o FILE]");
    CHECK_EQ_INT(find("", "--help"), 0);
    check_has("CUDA    $CUDA_HOME, $CUDA_PATH, nvcc in PATH");
}
