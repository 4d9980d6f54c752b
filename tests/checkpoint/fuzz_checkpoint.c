/* fuzz_checkpoint.c - a libFuzzer target: manifests, indices and whole directories of checkpoints,
   which a world of one rank loads from files in memory

       clang -std=c99 -g -O1 -I. -Itests -fsanitize=fuzzer,address,undefined \
           tests/checkpoint/fuzz_checkpoint.c tests/library.c -o build/fuzz_checkpoint -pthread -lm
       FSDP_FUZZ_SEEDS=build/seeds build/fuzz_checkpoint -runs=0      # writes the golden example
   there
       build/fuzz_checkpoint -max_len=8192 -max_total_time=600 build/seeds

   An input has a kind (1 byte), a way to load it (1 byte, FUZZ_*) and the rest. Kind 1: a manifest
   next to the data files of the golden example. 2: an index next to a file of full tensors. 3:
   files, each with a name (1 byte, see fuzz_leaves), two bytes of length, and its bytes. With
   FUZZ_SIGN a manifest gets a valid checksum. Whatever the input is, the load ends with a status of
   its list, the same status a second time, without more memory than 8 times the input, and the
   world still works. tests/checkpoint/test_checkpoint_faults.c includes this file and runs
   mutations of the example from a seed.

   SPDX-License-Identifier: MIT */
#ifndef HARNESS_H
#define _GNU_SOURCE 1
#include <dirent.h>   /* opendir */
#include <errno.h>    /* errno */
#include <fcntl.h>    /* open */
#include <pthread.h>  /* pthread_mutex_lock */
#include <stdint.h>   /* uint8_t */
#include <stdio.h>    /* fprintf */
#include <stdlib.h>   /* abort, calloc */
#include <string.h>   /* memcpy */
#include <sys/stat.h> /* mkdir */
#include <unistd.h>   /* pread */
#define H_FN static __attribute__((unused))
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (condition) break;                                                                      \
        fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                            \
        abort();                                                                                   \
    } while (0)
H_FN void lab_fold(uint64_t *hash, const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t k = 0; k < nbytes; k++) *hash = (*hash ^ p[k]) * 1099511628211u;
}
#include "library.h"
#endif
#include "disk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

enum { FUZZ_SIGN = 1, FUZZ_ALL = 2, FUZZ_PARTIAL = 4, FUZZ_PARAMS = 8, FUZZ_FILE = 16 };
static const char *const fuzz_leaves[] = {"manifest.json",
                                          "shard-00001-model-00001-of-00001.safetensors",
                                          "shard-00002-model-00001-of-00001.safetensors",
                                          "model.safetensors.index.json",
                                          "model.safetensors",
                                          ".metadata",
                                          "x.safetensors"};
enum { FUZZ_LEAVES = 7, FUZZ_ROOM = 7 << 20 }; /* ROOM: memory that a load uses for reading */

static struct {
    fsdp_world *w;
    fsdp_checkpoint *ck;
    disk *d;
    int64_t live, peak;
    unsigned char loader[3], rng[2];
    uint8_t *example[3]; /* the golden files, in the order of fuzz_leaves */
    size_t sizes[3], whole_size;
    uint8_t whole[400];
} fuzz;

static void *fuzz_alloc(size_t size, size_t align, void *user) {
    void *ptr = NULL;
    (void)user;
    if (size >> 40 || posix_memalign(&ptr, align, size)) return NULL;
    fuzz.live += (int64_t)size;
    if (fuzz.live > fuzz.peak) fuzz.peak = fuzz.live;
    return ptr;
}
static void fuzz_free(void *ptr, size_t size, void *user) {
    (void)user;
    if (ptr) fuzz.live -= (int64_t)size;
    free(ptr);
}
static void fuzz_log(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)text, (void)user;
}

static uint8_t *fuzz_read_file(const char *leaf, size_t *size) {
    const char *dir = getenv("FSDP_GOLDEN_DIR");
    char path[600];
    uint8_t *data = (uint8_t *)malloc(1 << 16);
    snprintf(path, sizeof path, "%s/example/step-00000017/%s", dir && *dir ? dir : "tests/golden",
             leaf);
    FILE *f = fopen(path, "rb");
    CHECK(f && data);
    *size = fread(data, 1, 1 << 16, f);
    fclose(f);
    return data;
}
/* Makes a file like Hugging Face's, with full tensors. */
static void fuzz_make_whole(void) {
    fsdp_safetensors_entry e[2];
    memset(e, 0, sizeof e);
    e[0].name = "h.0.w", e[0].dtype = FSDP_F32, e[0].ndim = 2;
    e[0].shape[0] = 3, e[0].shape[1] = 2;
    e[1].name = "h.0.b", e[1].dtype = FSDP_BF16, e[1].ndim = 1;
    e[1].shape[0] = 2;
    int64_t n = fsdp_safetensors_print(e, 2, 0, NULL, NULL, 0, (char *)fuzz.whole + 8,
                                       (int64_t)sizeof fuzz.whole - 8);
    CHECK(n > 0 && n < 256);
    fuzz.whole[0] = (uint8_t)n;
    fuzz.whole_size = 8 + (size_t)n + 28;
}
/* Makes the model of the golden example on one rank. */
static void fuzz_begin(void) {
    fsdp_world_desc wd = FSDP_ZERO;
    fsdp_model *model = NULL;
    fsdp_unit *unit = NULL;
    fsdp_param_desc p[2] = {fsdp_mat("w", 3, 2), fsdp_vec("b", 2)};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    fsdp_adamw *opt;
    fsdp_checkpoint_blob blobs[2] = {{"loader", fuzz.loader, 3, 0, 1}, {"rng", fuzz.rng, 2, 1, 1}};
    wd.world_size = 1, wd.comm_threads = -1;
    wd.logger.log = fuzz_log;
    wd.allocator.alloc = fuzz_alloc, wd.allocator.free = fuzz_free;
    fuzz.d = disk_new();
    fuzz.d->quiet = 1;
    p[1].dtype = FSDP_BF16, p[1].frozen = 1;
    ud.name = "h.0", ud.params = p, ud.num_params = 2;
    d.blobs = blobs, d.num_blobs = 2;
    d.files = &disk_ops, d.files_user = fuzz.d;
    CHECK(!fsdp_init(&wd, &fuzz.w));
    CHECK(!fsdp_model_create(fuzz.w, NULL, &model));
    CHECK(!fsdp_fully_shard(model, &ud, &unit));
    CHECK(!fsdp_adamw_create(model, NULL, &opt));
    CHECK(!fsdp_checkpoint_create(model, &d, &fuzz.ck));
    for (int i = 0; i < 3; i++) fuzz.example[i] = fuzz_read_file(fuzz_leaves[i], &fuzz.sizes[i]);
    fuzz_make_whole();
}

static void fuzz_put(const char *leaf, const uint8_t *data, size_t size, int sign) {
    char path[120], tail[32];
    void *file;
    int64_t done;
    snprintf(path, sizeof path, "run/%s", leaf);
    if (disk_open(fuzz.d, path, 1, &file, &done)) return; /* for equal names the first counts */
    size_t body = sign && size >= 23 ? size - 23 : size;
    (void)disk_write(fuzz.d, file, data, (int64_t)body, 0, &done);
    if (body == size) return;
    snprintf(tail, sizeof tail, ",\n\"crc32c\":\"%08x\"}\n",
             (unsigned)fsdp_crc32c(0, data, (int64_t)body));
    (void)disk_write(fuzz.d, file, tail, 23, (int64_t)body, &done);
}
static void fuzz_put_files(const uint8_t *at, const uint8_t *end, int sign) {
    while (end - at >= 3) {
        size_t size = (size_t)at[1] + 256 * (size_t)at[2], which = at[0] % FUZZ_LEAVES;
        at += 3;
        if (size > (size_t)(end - at)) size = (size_t)(end - at);
        fuzz_put(fuzz_leaves[which], at, size, sign && which == 0);
        at += size;
    }
}

static fsdp_status fuzz_load(int how, int64_t *peak) {
    fsdp_checkpoint_load_desc d = FSDP_ZERO;
    d.verify = how & FUZZ_ALL ? FSDP_VERIFY_ALL : FSDP_VERIFY_READ;
    d.partial = (how & FUZZ_PARTIAL) != 0;
    d.params_only = (how & FUZZ_PARAMS) != 0;
    int64_t live = fuzz.live;
    fuzz.peak = live;
    fsdp_status status = fsdp_checkpoint_load(
        fuzz.ck, how & FUZZ_FILE ? "run/model.safetensors" : "run", &d);
    CHECK(fuzz.live - live < 65536); /* tables of the object may have grown */
    *peak = fuzz.peak - live;
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char text[1100];
    int64_t peak, bytes = 0;
    if (size < 2) return 0;
    if (!fuzz.w) fuzz_begin();
    disk *d = fuzz.d;
    for (int i = 1; i < d->num_nodes; i++) free(d->nodes[i].data), free(d->nodes[i].entries);
    d->num_nodes = 1, d->nodes[0].num = 0;
    CHECK(!disk_make_dir(d, "run"));
    const int kind = data[0] % 8, how = data[1];
    if (kind == 1) fuzz_put(fuzz_leaves[0], data + 2, size - 2, how & FUZZ_SIGN);
    else if (kind == 2) fuzz_put(fuzz_leaves[3], data + 2, size - 2, 0);
    else if (kind == 3) fuzz_put_files(data + 2, data + size, how & FUZZ_SIGN);
    else return 0;
    if (kind == 2) fuzz_put(fuzz_leaves[4], fuzz.whole, fuzz.whole_size, 0);
    for (int i = 1; i < 3 && kind == 1; i++)
        fuzz_put(fuzz_leaves[i], fuzz.example[i], fuzz.sizes[i], 0);
    for (int i = 1; i < d->num_nodes; i++) bytes += d->nodes[i].size;
    fsdp_status status = fuzz_load(how, &peak);
    snprintf(text, sizeof text, "%s", status ? fsdp_last_error(fuzz.w) : "");
    if (peak > 8 * bytes + FUZZ_ROOM)
        fprintf(stderr, "%lld of %lld\n", (long long)peak, (long long)bytes);
    CHECK(peak <= 8 * bytes + FUZZ_ROOM);
    CHECK(status == FSDP_OK || status == FSDP_ERR_CORRUPT || status == FSDP_ERR_IO ||
          status == FSDP_ERR_INVALID_ARG || status == FSDP_ERR_UNSUPPORTED);
    CHECK(fuzz_load(how, &peak) == status);
    CHECK(!status || !strcmp(text, fsdp_last_error(fuzz.w)));
    CHECK(fsdp_world_status(fuzz.w) == FSDP_OK);
    return 0;
}

/* ---- the golden example, as inputs ----------------------------------------------------------- */

typedef void fuzz_each(const char *name, const uint8_t *input, size_t size, void *arg);

static void fuzz_seeds(fuzz_each *each, void *arg) {
    static const char index[] = "{\"metadata\":{\"total_size\":28},\"weight_map\":{\"h.0.b\":"
                                "\"model.safetensors\",\"h.0.w\":\"model.safetensors\"}}";
    uint8_t *in = (uint8_t *)malloc(1 << 16);
    size_t n = 2;
    CHECK(in != NULL);
    if (!fuzz.w) fuzz_begin();
    in[0] = 1, in[1] = FUZZ_SIGN;
    memcpy(in + 2, fuzz.example[0], fuzz.sizes[0]);
    each("manifest", in, 2 + fuzz.sizes[0], arg);
    in[0] = 2, in[1] = FUZZ_PARAMS;
    memcpy(in + 2, index, sizeof index - 1);
    each("index", in, 1 + sizeof index, arg);
    in[0] = 3, in[1] = FUZZ_SIGN | FUZZ_ALL;
    for (int i = 0; i < 3; i++) {
        in[n] = (uint8_t)i, in[n + 1] = fuzz.sizes[i] & 255,
        in[n + 2] = (uint8_t)(fuzz.sizes[i] >> 8);
        memcpy(in + n + 3, fuzz.example[i], fuzz.sizes[i]);
        n += 3 + fuzz.sizes[i];
    }
    each("directory", in, n, arg);
    size_t first = 2 + 3 + fuzz.sizes[0]; /* without a manifest: like other directories */
    memmove(in + 2, in + first, n - first);
    in[1] = 0;
    each("data_files", in, n - first + 2, arg);
    free(in);
}

static void fuzz_write(const char *name, const uint8_t *input, size_t size, void *arg) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", (const char *)arg, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(input, 1, size, f) == size && !fclose(f));
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    char *seeds = getenv("FSDP_FUZZ_SEEDS");
    (void)argc, (void)argv;
    if (seeds) fuzz_seeds(fuzz_write, seeds);
    return 0;
}
