/* test_fsdpck.c - checkpoints without a world: the reader, verify and export of fsdp_checkpoint.h,
   compared with the golden directories of PyTorch and transformers; damage of every byte; file
   calls that fail; and tools/fsdpck with every verb and exit status. The tool under test is
   $FSDPCK, or tools/fsdpck.

   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(ASAN)
#include "harness.h"
#include "golden.h"
#include "lab.h"
#include "fsdp_checkpoint.h"
#include <sys/resource.h> /* setrlimit */

static const char *const example_files[3] = {"manifest.json",
                                             "shard-00001-model-00001-of-00001.safetensors",
                                             "shard-00002-model-00001-of-00001.safetensors"};

typedef struct blob {
    char *at;
    int64_t size;
} blob;

static char said[16384]; /* output of the last call or command */
#define SAID said, sizeof said

/* ---- files ----------------------------------------------------------------------------------- */

static const char *path_of(char out[600], const char *name) {
    snprintf(out, 600, "%s/%s", h_tmpdir(), name);
    return out;
}
static const char *golden_path(char out[600], const char *name) {
    golden_needs(name);
    snprintf(out, 600, "%s/%s", golden_dir(), name);
    return out;
}
static blob load(const char *dir, const char *leaf) {
    char path[800];
    blob b = {NULL, 0};
    snprintf(path, sizeof path, *leaf ? "%s/%s" : "%s", dir, leaf);
    FILE *f = fopen(path, "rb");
    CHECK_MSG(f != NULL, "%s", path);
    CHECK(fseek(f, 0, SEEK_END) == 0);
    b.size = ftell(f);
    rewind(f);
    b.at = (char *)malloc((size_t)b.size + 1);
    CHECK(b.at && fread(b.at, 1, (size_t)b.size, f) == (size_t)b.size);
    b.at[b.size] = 0;
    fclose(f);
    return b;
}
static void store(const char *dir, const char *leaf, const void *data, int64_t nbytes) {
    char path[800];
    snprintf(path, sizeof path, *leaf ? "%s/%s" : "%s", dir, leaf);
    FILE *f = fopen(path, "wb");
    CHECK_MSG(f && fwrite(data, 1, (size_t)nbytes, f) == (size_t)nbytes, "%s", path);
    CHECK_EQ_INT(fclose(f), 0);
}
static void same_file(const char *dir, const char *leaf, const char *other,
                      const char *other_leaf) {
    blob a = load(dir, leaf), b = load(other, other_leaf);
    CHECK_EQ_INT(a.size, b.size);
    CHECK_EQ_MEM(a.at, b.at, (size_t)a.size);
    free(a.at);
    free(b.at);
}
static void says(const char *part) {
    CHECK_MSG(strstr(said, part), "\"%s\" does not say \"%s\"", said, part);
}

/* Writes a safetensors file of these tensors, whose elements follow from a formula. */
static void store_tensors(const char *dir, const char *leaf, fsdp_safetensors_entry *e, int n) {
    int64_t need = fsdp_safetensors_print(e, n, 0, NULL, NULL, 0, NULL, 0);
    CHECK(need > 0);
    int64_t data = e[n - 1].end;
    unsigned char *room = (unsigned char *)malloc((size_t)(8 + need + data));
    CHECK(room != NULL);
    for (int i = 0; i < 8; i++) room[i] = (unsigned char)((uint64_t)need >> (8 * i) & 255);
    CHECK_EQ_INT(fsdp_safetensors_print(e, n, 0, NULL, NULL, 0, (char *)room + 8, need), need);
    for (int64_t i = 0; i < data; i++)
        room[8 + need + i] = (unsigned char)(golden_splitmix64((uint64_t)i / 4) >> (8 * (i % 4)));
    for (int i = 0; i < n; i++) /* the exponent is small, so that no NaN or infinity occurs */
        if (e[i].dtype == FSDP_F32)
            for (int64_t k = e[i].begin; k < e[i].end; k += 4)
                room[8 + need + k + 3] = (unsigned char)(0x3f | (room[8 + need + k + 3] & 0x80));
    store(dir, leaf, room, 8 + need + data);
    free(room);
}
static fsdp_safetensors_entry tensor(const char *name, fsdp_dtype dtype, int ndim, int64_t a,
                                     int64_t b, int64_t c) {
    fsdp_safetensors_entry e = FSDP_ZERO;
    e.name = name, e.dtype = dtype, e.ndim = ndim;
    e.shape[0] = a;
    if (ndim > 1) e.shape[1] = b;
    if (ndim > 2) e.shape[2] = c;
    return e;
}

/* ---- the reader ------------------------------------------------------------------------------ */

static uint64_t seed_of(const char *name) {
    uint32_t h = 0x811C9DC5u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x01000193u;
    return h;
}
static fsdp_checkpoint_reader *open_it(const char *path) {
    fsdp_checkpoint_reader *r;
    fsdp_status status = fsdp_checkpoint_open(path, NULL, NULL, &r, SAID);
    CHECK_MSG(status == FSDP_OK && !said[0], "%s: %s", path, said);
    return r;
}
static int64_t index_of(const fsdp_checkpoint_reader *r, const char *name) {
    fsdp_checkpoint_tensor t;
    const int64_t index = fsdp_checkpoint_tensor_find(r, name);
    CHECK_MSG(index >= 0, "no tensor %s", name);
    for (int64_t i = 0; !fsdp_checkpoint_tensor_at(r, i, &t); i++) {
        CHECK_EQ_INT(fsdp_checkpoint_tensor_find(r, t.name), i);
        char other[600];
        snprintf(other, sizeof other, "%s.", t.name); /* its neighbour in the order */
        CHECK_EQ_INT(fsdp_checkpoint_tensor_find(r, other), -1);
    }
    CHECK_EQ_INT(fsdp_checkpoint_tensor_find(r, ""), -1);
    CHECK_EQ_INT(fsdp_checkpoint_tensor_find(r, "\xff"), -1);
    CHECK_EQ_INT(fsdp_checkpoint_tensor_find(r, NULL), -1);
    CHECK_EQ_INT(fsdp_checkpoint_tensor_find(NULL, name), -1);
    return index;
}

/* Checks the full tensor, and each box of some of its elements. */
static void check_golden_tensor(fsdp_checkpoint_reader *r, const char *name, int is_step,
                                double step) {
    double want[1024], got[1024], box[1024];
    const int64_t index = index_of(r, name);
    fsdp_checkpoint_tensor t;
    CHECK_OK(fsdp_checkpoint_tensor_at(r, index, &t));
    int64_t numel = 1;
    for (int d = 0; d < t.ndim; d++) numel *= t.shape[d];
    CHECK(numel <= 1024);
    CHECK_EQ_INT(t.nbytes, numel * (int64_t)fsdp_dtype_size(t.dtype));
    for (int64_t i = 0; i < numel; i++) {
        float exact = is_step ? (float)step : (float)golden_value(seed_of(name), (uint64_t)i, 1);
        uint16_t half;
        want[i] = (double)exact;
        if (t.dtype == FSDP_F32) continue;
        CHECK_OK(fsdp_convert(&half, t.dtype, &exact, FSDP_F32, 1));
        CHECK_OK(fsdp_convert(&want[i], FSDP_F64, &half, t.dtype, 1));
    }
    CHECK_OK(fsdp_checkpoint_read(r, index, NULL, NULL, FSDP_F64, got, SAID));
    CHECK_EQ_MEM(got, want, (size_t)numel * sizeof *got);
    if (!numel || !t.ndim) return;
    for (int64_t row = 0; row < t.shape[0]; row++) { /* from this row on, without the last column */
        int64_t start[FSDP_MAX_DIMS] = {row}, shape[FSDP_MAX_DIMS], inner = numel / t.shape[0],
                k = 0;
        memcpy(shape, t.shape, sizeof shape);
        shape[0] = t.shape[0] - row;
        if (t.ndim > 1) shape[t.ndim - 1]--;
        CHECK_OK(fsdp_checkpoint_read(r, index, start, shape, FSDP_F64, box, SAID));
        for (int64_t i = row * inner; i < numel; i++)
            if (t.ndim == 1 || (i + 1) % t.shape[t.ndim - 1]) CHECK(box[k++] == want[i]);
    }
}

/* Reads `files n NAME..`. Returns the number of files that contain tensors. */
static int golden_files(golden *g) {
    int count = 0;
    for (int64_t n = golden_int(g); n > 0; n--) {
        const char *name = golden_word(g), *end = strrchr(name, '.');
        count += end && !strcmp(end, ".safetensors");
    }
    return count;
}

TEST(fsdpck, reads_golden_directories) {
    char path[600], name[200];
    int cases = 0;
    golden g;
    if (!golden_open(&g, "checkpoints/cases.txt", "checkpoints")) SKIP(g.error);
    while (golden_case(&g)) {
        fsdp_checkpoint_contents c;
        int64_t tensors = 0;
        snprintf(name, sizeof name, "checkpoints/%s", g.name);
        fsdp_checkpoint_reader *r = open_it(golden_path(path, name));
        CHECK_OK(fsdp_checkpoint_contents_of(r, &c));
        CHECK(c.step == -1 && !c.has_checksums && c.num_boxes >= c.num_tensors);
        while (golden_line(&g)) {
            if (golden_is(&g, "files")) CHECK_EQ_INT(c.num_files, golden_files(&g));
            if (golden_is(&g, "tensor")) check_golden_tensor(r, golden_word(&g), 0, 0), tensors++;
            if (!golden_is(&g, "step")) continue;
            snprintf(name, sizeof name, "optim.state.%s.step", golden_word(&g));
            check_golden_tensor(r, name, 1, golden_num(&g));
            tensors++;
        }
        CHECK_EQ_INT(c.num_tensors, tensors);
        fsdp_checkpoint_close(r);
        cases++;
    }
    CHECK_MSG(!g.error[0], "%s", g.error);
    CHECK(cases > 0);
    golden_close(&g);
}

TEST(fsdpck, reads_the_example) {
    char path[600], loader[4] = "";
    double step = 0;
    fsdp_checkpoint_contents c;
    fsdp_checkpoint_tensor t;
    fsdp_checkpoint_reader *r = open_it(golden_path(path, "example/step-00000017"));
    CHECK_OK(fsdp_checkpoint_contents_of(r, &c));
    CHECK(c.step == 17 && c.world == 2 && c.num_files == 2 && c.num_tensors == 7);
    CHECK(c.num_boxes == 11 && c.data_bytes == 89 && c.has_checksums == 1);
    CHECK_OK(fsdp_checkpoint_tensor_at(r, 3, &t));
    CHECK_EQ_STR(t.name, "h.0.w");
    CHECK(t.dtype == FSDP_F32 && t.ndim == 2 && t.num_boxes == 2 && t.nbytes == 24);
    CHECK(t.shape[0] == 3 && t.shape[1] == 2);
    CHECK_OK(fsdp_checkpoint_read(r, 0, NULL, NULL, FSDP_DTYPE_KEEP, loader, SAID));
    CHECK_EQ_STR(loader, "abc");
    CHECK_OK(fsdp_checkpoint_read(r, 6, NULL, NULL, FSDP_DTYPE_KEEP, &step, SAID));
    CHECK(step == 17);
    fsdp_checkpoint_close(r);
    fsdp_checkpoint_close(NULL);
}

TEST(fsdpck, reader_refuses) {
    char path[600], room[64], longer[FSDP_CHECKPOINT_PATH];
    const int64_t start[2] = {0, 0}, shape[2] = {3, 2}, wide[2] = {3, 3}, past[2] = {4, 0},
                  under[2] = {-1, 0}, none[2] = {0, 0};
    fsdp_checkpoint_contents c;
    fsdp_checkpoint_tensor t;
    fsdp_checkpoint_reader *r = open_it(golden_path(path, "example/step-00000017"));
    CHECK_STATUS(fsdp_checkpoint_read(r, 7, NULL, NULL, FSDP_DTYPE_KEEP, room, SAID),
                 FSDP_ERR_INVALID_ARG);
    says("[E462] checkpoint_read: tensor 7 of 7: expected an index below their number");
    CHECK_STATUS(fsdp_checkpoint_read(r, -1, NULL, NULL, FSDP_DTYPE_KEEP, room, SAID),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_read(r, 3, start, wide, FSDP_F32, room, SAID),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_read(r, 3, past, none, FSDP_F32, room, SAID),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_read(r, 3, under, shape, FSDP_F32, room, SAID),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_read(r, 3, start, NULL, FSDP_F32, room, SAID),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_read(r, 3, start, shape, FSDP_I32, room, SAID),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_read(r, 0, NULL, NULL, FSDP_F32, room, SAID),
                 FSDP_ERR_INVALID_ARG);
    CHECK_OK(fsdp_checkpoint_read(r, 3, start, none, FSDP_F32, room, SAID));
    CHECK_OK(fsdp_checkpoint_read(r, 3, start, shape, FSDP_F32, room, NULL, 0));
    CHECK_STATUS(fsdp_checkpoint_read(r, 3, NULL, NULL, FSDP_F32, NULL, SAID),
                 FSDP_ERR_INVALID_ARG);
    says("[E460] checkpoint_read: reader or to is NULL");
    CHECK_STATUS(fsdp_checkpoint_tensor_at(r, 7, &t), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_tensor_at(r, -1, &t), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_tensor_at(NULL, 0, &t), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_contents_of(NULL, &c), FSDP_ERR_INVALID_ARG);
    fsdp_checkpoint_close(r);
    memset(longer, 'x', sizeof longer - 1), longer[sizeof longer - 1] = 0;
    CHECK_STATUS(fsdp_checkpoint_open(longer, NULL, NULL, &r, SAID), FSDP_ERR_INVALID_ARG);
    says("[E460] checkpoint_open: path is NULL, empty, or longer than 3796 bytes");
    CHECK(r == NULL);
    CHECK_STATUS(fsdp_checkpoint_open("", NULL, NULL, &r, NULL, 0), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_open(path, NULL, NULL, NULL, SAID), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_checkpoint_open("/nowhere/at all", NULL, NULL, &r, SAID), FSDP_ERR_IO);
    says("/nowhere/at all: there is no such file or directory");
}

static void export_to(const char *from, const char *to, const fsdp_checkpoint_export_desc *d) {
    fsdp_status status = fsdp_checkpoint_export(from, to, d, SAID);
    CHECK_MSG(status == FSDP_OK && !said[0], "%s to %s: %s", from, to, said);
}
/* Tensors of dtypes that the library lacks: their bytes are read and copied. */
static fsdp_safetensors_entry foreign(const char *name, const char *dtype, int ndim, int64_t a,
                                      int64_t b) {
    fsdp_safetensors_entry e = tensor(name, FSDP_SAFETENSORS_OTHER, ndim, a, b, 0);
    while (strcmp(fsdp_safetensors_dtype_name(e.file_dtype), dtype) != 0) e.file_dtype++;
    return e;
}
TEST(fsdpck, foreign_dtypes) {
    fsdp_safetensors_entry e[9] = {
        foreign("bool", "BOOL", 1, 5, 0),        foreign("f8", "F8_E4M3", 2, 700, 301),
        foreign("u16", "U16", 2, 200000, 1),     foreign("u32", "U32", 0, 0, 0),
        foreign("u64", "U64", 1, 3, 0),          foreign("c64", "C64", 2, 2, 2),
        tensor("f32", FSDP_F32, 2, 300, 500, 0), tensor("i8", FSDP_I8, 1, 3, 0, 0),
        foreign("none", "F8_E8M0", 1, 0, 0)};
    static const char *const same[] = {"out", "ours", "cut", "back"};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], out[600], ours[600], cut[600], back[600], *x = (char *)malloc(1200000), *y;
    store_tensors(h_tmpdir(), "from.safetensors", e, 9);
    path_of(from, "from.safetensors");
    CHECK(x != NULL);
    y = x + 600000;
    d.dtype = FSDP_BF16; /* for the library's own dtypes only */
    export_to(from, path_of(out, "narrow"), &d);
    d.dtype = FSDP_DTYPE_KEEP;
    export_to(from, path_of(out, "out"), NULL);
    d.num_ranks = 3;
    export_to(from, path_of(ours, "ours"), &d);
    d.num_ranks = 2;
    export_to(ours, path_of(cut, "cut"), &d);
    export_to(cut, path_of(back, "back"), NULL);
    same_file(out, "model.safetensors", back, "model.safetensors");
    for (int k = 0; k < 4; k++) {
        char path[600];
        fsdp_checkpoint_reader *a = open_it(from), *b = open_it(path_of(path, same[k]));
        for (int i = 0; i < 9; i++) {
            fsdp_checkpoint_tensor t, u;
            const int64_t p = index_of(a, e[i].name), q = index_of(b, e[i].name);
            CHECK_OK(fsdp_checkpoint_tensor_at(a, p, &t));
            CHECK_OK(fsdp_checkpoint_tensor_at(b, q, &u));
            CHECK(t.dtype == u.dtype && t.file_dtype == u.file_dtype && t.nbytes == u.nbytes);
            CHECK_OK(fsdp_checkpoint_read(a, p, NULL, NULL, FSDP_DTYPE_KEEP, x, SAID));
            CHECK_OK(fsdp_checkpoint_read(b, q, NULL, NULL, FSDP_DTYPE_KEEP, y, SAID));
            CHECK_EQ_MEM(x, y, (size_t)t.nbytes);
            if (t.dtype != FSDP_SAFETENSORS_OTHER || !t.nbytes) continue;
            CHECK_STATUS(fsdp_checkpoint_read(a, p, NULL, NULL, FSDP_F32, x, SAID),
                         FSDP_ERR_INVALID_ARG);
            CHECK_STATUS(fsdp_checkpoint_read(a, p, NULL, NULL, FSDP_U8, x, SAID),
                         FSDP_ERR_INVALID_ARG);
        }
        fsdp_checkpoint_close(a);
        fsdp_checkpoint_close(b);
    }
    free(x);
}

/* Tensors with elements of less than a byte, or with too many dims, are listed, but neither read
   nor written. */
static int without_e(void *user, const char *name, char *out) {
    (void)user;
    snprintf(out, FSDP_CHECKPOINT_NAME, "%s", name);
    return name[0] != 'e' && name[0] != 'n';
}
TEST(fsdpck, elements_that_cannot_be_moved) {
    static const char head[] =
        "{\"e\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,2]},"
        "\"n\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[2,3]},"
        "\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[3,4]}}";
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char dir[600], out[600], byte[4];
    fsdp_checkpoint_reader *r;
    fsdp_checkpoint_tensor t;
    path_of(dir, "foreign.safetensors");
    blob b = {(char *)malloc(8 + sizeof head - 1 + 4), 8 + sizeof head - 1 + 4};
    CHECK(b.at != NULL);
    memset(b.at, 7, (size_t)b.size);
    memset(b.at, 0, 8);
    b.at[0] = (char)((sizeof head - 1) & 255);
    memcpy(b.at + 8, head, sizeof head - 1);
    store(dir, "", b.at, b.size);
    free(b.at);
    r = open_it(dir);
    CHECK_OK(fsdp_checkpoint_tensor_at(r, 0, &t));
    CHECK(t.dtype == FSDP_SAFETENSORS_OTHER && t.nbytes == 2 && t.ndim == 1 && t.shape[0] == 4);
    CHECK_EQ_STR(fsdp_safetensors_dtype_name(t.file_dtype), "F4");
    CHECK_STATUS(fsdp_checkpoint_read(r, 0, NULL, NULL, FSDP_DTYPE_KEEP, byte, SAID),
                 FSDP_ERR_UNSUPPORTED);
    says("[E461] checkpoint_read: 'e' is F4 with 1 dims, which the library cannot move: leave it "
         "out (fsdpck: --skip NAME; a program: rename of the desc)");
    CHECK_STATUS(fsdp_checkpoint_read(r, 1, NULL, NULL, FSDP_DTYPE_KEEP, byte, SAID),
                 FSDP_ERR_UNSUPPORTED);
    CHECK_OK(fsdp_checkpoint_read(r, 2, NULL, NULL, FSDP_DTYPE_KEEP, byte, SAID));
    CHECK_EQ_INT(byte[0], 7);
    fsdp_checkpoint_close(r);
    CHECK_STATUS(fsdp_checkpoint_export(dir, path_of(out, "out"), NULL, SAID),
                 FSDP_ERR_UNSUPPORTED);
    says("[E461] checkpoint_export: 'e' is F4");
    CHECK_EQ_INT(h_entries(h_tmpdir()), 3);
    d.rename = without_e;
    CHECK_OK(fsdp_checkpoint_export(dir, out, &d, SAID));
}

/* ---- directories of other programs ----------------------------------------------------------- */

/* Writes a file of tensors with one element: "ab" gives 'a' and 'b' the values first, first + 1. */
static void store_letters(const char *dir, const char *leaf, const char *letters, int first) {
    fsdp_safetensors_entry e[4];
    char names[4][2], room[600];
    float values[4];
    int n = 0;
    for (; letters[n]; n++) {
        names[n][0] = letters[n], names[n][1] = 0;
        e[n] = tensor(names[n], FSDP_F32, 1, 1, 0, 0);
        values[n] = (float)(first + n);
    }
    int64_t need = fsdp_safetensors_print(e, n, 0, NULL, NULL, 0, room + 8, 500);
    CHECK(need > 0);
    memset(room, 0, 8);
    room[0] = (char)(need & 255), room[1] = (char)(need >> 8);
    memcpy(room + 8 + need, values, 4 * (size_t)n);
    store(dir, leaf, room, 8 + need + 4 * n);
}
/* Writes an index: "a=1 b=2" places 'a' in the first file of the list. */
static void store_index(const char *dir, const char *leaf, const char *map,
                        const char *const *files) {
    char text[1000] = "{\"weight_map\":{", line[300];
    for (const char *at = map; *at; at += 3 + (at[3] == ' ')) {
        snprintf(line, sizeof line, "%s\"%c\":\"%s\"", at == map ? "" : ",", at[0],
                 files[at[2] - '1']);
        strcat(text, line);
    }
    strcat(text, "}}");
    store(dir, leaf, text, (int64_t)strlen(text));
}

typedef struct dir_case {
    const char *name;
    /* names and contents of files; values are 1, 2, ...; 11, 12, ... */
    const char *files[6], *letters[6];
    const char *index, *map; /* of these files; may name missing ones */
    const char *text;        /* expected error; NULL: none */
    const char *values;      /* "a=1 b=2": expected values */
} dir_case;
#define M(i, n) "model-0000" #i "-of-0000" #n ".safetensors"
#define U       "diffusion_pytorch_model"
static const char model_index[] = "model.safetensors.index.json";
static const dir_case dirs[] = {
    {"two_files", {"x.safetensors", "y.safetensors"}, {"a", "b"}, NULL, NULL, NULL, "a=1 b=11"},
    /* One tensor in two files. */
    {"ema",
     {U ".safetensors", U ".non_ema.safetensors"},
     {"ab", "b"},
     NULL,
     NULL,
     "tensor 'b' is in diffusion_pytorch_model.non_ema.safetensors and in "
     "diffusion_pytorch_model.safetensors with other values: keep the file that is meant",
     NULL},
    {"equal", {"x.safetensors", "y.safetensors"}, {"a", "A"}, NULL, NULL, NULL, "a=1"},
    {"old_and_new",
     {M(1, 2), M(2, 2), M(1, 1)},
     {"a", "b", "ab"},
     NULL,
     NULL,
     "tensor 'a' is in model-00001-of-00001.safetensors and in model-00001-of-00002",
     NULL},
    /* Names that contain the number of files. */
    {"first_gone",
     {M(2, 3), M(3, 3)},
     {"b", "c"},
     NULL,
     NULL,
     "it lacks model-00001-of-00003.safetensors: its names tell of 3 files: add it, or pass one",
     NULL},
    {"second_gone",
     {M(1, 3), M(3, 3)},
     {"a", "c"},
     NULL,
     NULL,
     "it lacks model-00002-of-00003.safetensors",
     NULL},
    {"last_gone",
     {M(1, 3), M(2, 3)},
     {"a", "b"},
     NULL,
     NULL,
     "it lacks model-00003-of-00003.safetensors",
     NULL},
    {"two_sets",
     {M(1, 2), M(2, 2), M(1, 3), M(2, 3)},
     {"a", "b", "c", "d"},
     NULL,
     NULL,
     "it lacks model-00003-of-00003.safetensors",
     NULL},
    {"variant",
     {"m-1-of-2.fp16.safetensors"},
     {"a"},
     NULL,
     NULL,
     "it lacks m-2-of-2.fp16.safetensors",
     NULL},
    {"all_there",
     {M(1, 2), M(2, 2), "m-of-x.safetensors"},
     {"a", "b", "c"},
     NULL,
     NULL,
     NULL,
     "a=1 b=11 c=21"},
    {"from_0", {M(0, 2), M(1, 2)}, {"a", "b"}, NULL, NULL, NULL, "a=1 b=11"},
    {"from_0_and_from_1",
     {"a-0-of-1.safetensors", "b-1-of-1.safetensors", "c-0-of-2.safetensors",
      "c-1-of-2.safetensors"},
     {"a", "b", "c", "d"},
     NULL,
     NULL,
     NULL,
     "a=1 b=11 c=21 d=31"},
    {"from_0_second_gone",
     {M(0, 3), M(2, 3)},
     {"a", "c"},
     NULL,
     NULL,
     "it lacks model-00001-of-00003.safetensors",
     NULL},
    {"from_0_last_gone",
     {M(0, 3), M(1, 3)},
     {"a", "b"},
     NULL,
     NULL,
     "it lacks model-00002-of-00003.safetensors",
     NULL},
    {"no_numbers",
     {"a-of-b-9-of-5.safetensors", "3-of-2.safetensors"},
     {"a", "b"},
     NULL,
     NULL,
     NULL,
     "a=1 b=11"},
    {"ranks_of_pytorch", /* each rank has files only for its tensors */
     {"shard-00001-" M(1, 2), "shard-00002-" M(2, 2), "shard-00003-" M(1, 2)},
     {"a", "b", "c"},
     NULL,
     NULL,
     NULL,
     "a=1 b=11 c=21"},
    {"ranks_of_pytorch_gone",
     {"shard-00001-" M(1, 3), "shard-00002-" M(3, 3)},
     {"a", "b"},
     NULL,
     NULL,
     "it lacks shard-00002-model-00002-of-00003.safetensors",
     NULL},
    /* An index. */
    {"index", {M(1, 2), M(2, 2)}, {"a", "b"}, model_index, "a=1 b=2", NULL, "a=1 b=11"},
    {"index_gone",
     {M(1, 2), M(2, 2)},
     {"a", NULL},
     model_index,
     "a=1 b=2",
     "it lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names",
     NULL},
    {"diffusers_gone",
     {U "-1.safetensors", U "-2.safetensors"},
     {"a", NULL},
     U ".safetensors.index.json",
     "a=1 b=2",
     "it lacks diffusion_pytorch_model-2.safetensors, which "
     "diffusion_pytorch_model.safetensors.index.json names",
     NULL},
    {"diffusers",
     {U "-1.safetensors", U "-2.safetensors", "other.safetensors"},
     {"a", "b", "a"},
     U ".safetensors.index.json",
     "a=1 b=2",
     NULL,
     "a=1 b=11"},
    {"variant_index",
     {"m-1.safetensors"},
     {"a"},
     "m.safetensors.index.fp16.json",
     "a=1 b=1",
     "m.safetensors.index.fp16.json: it names tensor 'b', which is in no file",
     NULL},
    {"decides", {M(1, 2), M(2, 2)}, {"ab", "b"}, model_index, "a=1 b=2", NULL, "a=1 b=11"},
    {"decides_for_the_first",
     {M(1, 2), M(2, 2)},
     {"ab", "bc"},
     model_index,
     "a=1 b=1 c=2",
     NULL,
     "a=1 b=2 c=12"},
    {"elsewhere",
     {M(1, 2), M(2, 2)},
     {"ab", "c"},
     model_index,
     "a=1 b=2 c=2",
     "tensor 'b' is in another file than the index says",
     NULL},
    {"not_named",
     {M(1, 2), M(2, 2)},
     {"ab", "c"},
     model_index,
     "a=1 c=2",
     "tensor 'b' is in a file, and the index does not name it",
     NULL},
    {"named_twice",
     {M(1, 1)},
     {"ab"},
     model_index,
     "a=1 b=1 a=1",
     "it names tensor 'a' twice",
     NULL},
    /* An index next to a single file. */
    {"stale_gone",
     {M(1, 2), M(2, 2), "model.safetensors"},
     {NULL, NULL, "ab"},
     model_index,
     "a=1 b=2",
     NULL,
     "a=21 b=22"},
    {"stale_there",
     {M(1, 2), M(2, 2), "model.safetensors"},
     {"a", "b", "ab"},
     model_index,
     "a=1 b=2",
     "it has model.safetensors and model.safetensors.index.json, which names other files: one of "
     "the two is of another save: remove it",
     NULL},
    {"stale_half",
     {M(1, 2), M(2, 2), "model.safetensors"},
     {"a", NULL, "ab"},
     model_index,
     "a=1 b=2",
     "it has model.safetensors and model.safetensors.index.json",
     NULL},
    {"stale_diffusers",
     {U "-1.safetensors", U ".safetensors"},
     {"a", "a"},
     U ".safetensors.index.json",
     "a=1",
     "it has diffusion_pytorch_model.safetensors and diffusion_pytorch_model.safetensors.index",
     NULL},
    {"index_of_the_one", {"model.safetensors"}, {"ab"}, model_index, "a=1 b=1", NULL, "a=1 b=2"},
};
#undef M
#undef U
static void make_dir_case(const dir_case *c, const char *dir) {
    CHECK_EQ_INT(mkdir(dir, 0755), 0);
    for (int i = 0; i < 6 && c->files[i]; i++)
        if (!c->letters[i]) continue;
        else if (c->letters[i][0] == 'A') store_letters(dir, c->files[i], "a", 1);
        else store_letters(dir, c->files[i], c->letters[i], 1 + 10 * i);
    if (c->index) store_index(dir, c->index, c->map, c->files);
}
TEST_P(fsdpck, directories, dirs) {
    fsdp_checkpoint_export_desc ours = FSDP_ZERO;
    char dir[600], out[600], checked[600];
    make_dir_case(row, path_of(dir, "dir"));
    fsdp_status expected = row->text ? FSDP_ERR_CORRUPT : FSDP_OK;
    CHECK_STATUS(fsdp_checkpoint_verify(dir, NULL, NULL, SAID), expected);
    if (row->text) says(row->text);
    CHECK_STATUS(fsdp_checkpoint_export(dir, path_of(out, "out"), NULL, SAID), expected);
    if (row->text) says(row->text);
    ours.num_ranks = 2;
    CHECK_STATUS(fsdp_checkpoint_export(dir, path_of(checked, "checked"), &ours, SAID), expected);
    if (row->text) says(row->text);
    for (int i = 0; i < 2 && !row->text; i++) {
        fsdp_checkpoint_contents in;
        fsdp_checkpoint_reader *r = open_it(i ? checked : out);
        int64_t num = 0;
        for (const char *at = row->values; *at;) {
            char name[2] = {at[0], 0}, *end;
            float value;
            const float want = (float)strtol(at + 2, &end, 10);
            CHECK_OK(
                fsdp_checkpoint_read(r, index_of(r, name), NULL, NULL, FSDP_F32, &value, SAID));
            CHECK_MSG(value >= want && value <= want, "%s: %g, expected %g", name, (double)value,
                      (double)want);
            at = end + (*end == ' ');
            num++;
        }
        CHECK_OK(fsdp_checkpoint_contents_of(r, &in));
        CHECK_EQ_INT(in.num_tensors, num);
        fsdp_checkpoint_close(r);
    }
}

/* Among several indices the one of transformers counts; without it the directory is refused. A
   directory of checkpoints is not a checkpoint. */
TEST(fsdpck, directories_of_several) {
    static const char *const one[] = {"x.safetensors"};
    char dir[600], run[600], path[800];
    CHECK_EQ_INT(mkdir(path_of(dir, "dir"), 0755), 0);
    store_letters(dir, "x.safetensors", "a", 1);
    store_index(dir, "u.safetensors.index.json", "a=1", one);
    store_index(dir, "v.safetensors.index.json", "a=1", one);
    CHECK_STATUS(fsdp_checkpoint_verify(dir, NULL, NULL, SAID), FSDP_ERR_CORRUPT);
    says("it has 2 indices, among them ");
    says("put the files of one of them into a directory of their own");
    store_index(dir, "model.safetensors.index.json", "a=1", one);
    CHECK_OK(fsdp_checkpoint_verify(dir, NULL, NULL, SAID));
    CHECK_EQ_INT(mkdir(path_of(run, "torch"), 0755), 0);
    store(run, "pytorch_model.bin", "PK\3\4\0\0\10\10", 8);
    CHECK_STATUS(fsdp_checkpoint_verify(run, NULL, NULL, SAID), FSDP_ERR_UNSUPPORTED);
    says("torch: it has pytorch_model.bin and no .safetensors file: if torch.save has written it");
    snprintf(path, sizeof path, "%s/pytorch_model.bin", run);
    CHECK_STATUS(fsdp_checkpoint_verify(path, NULL, NULL, SAID), FSDP_ERR_CORRUPT);
    says("pytorch_model.bin: is no safetensors file, but one of torch.save (a pickle)");
    CHECK_EQ_INT(mkdir(path_of(run, "run"), 0755), 0);
    static const char *const steps[] = {"checkpoint-500", "checkpoint-9000", "step_12",
                                        "step-00001000",  "step-x",          "notes"};
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof path, "%s/%s", run, steps[i]);
        CHECK_EQ_INT(mkdir(path, 0755), 0);
    }
    CHECK_STATUS(fsdp_checkpoint_verify(run, NULL, NULL, SAID), FSDP_ERR_INVALID_ARG);
    says("run: it is no checkpoint, but has some in it: pass one of them, for example "
         "run/checkpoint-9000");
}

TEST(fsdpck, reports_what_is_unknown) {
    char path[600], name[80];
    static const char *const whole[] = {"example/step-00000017", "checkpoints/transformers_gpt2",
                                        "checkpoints/torch_consolidated"};
    CHECK_OK(
        fsdp_checkpoint_verify(golden_path(path, "checkpoints/torch_fsdp_w3"), NULL, NULL, SAID));
    says("only headers were checked. They do not tell how large the whole tensors are: if the "
         "file with the last parts is missing, nobody can see it");
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s", whole[i]);
        CHECK_OK(fsdp_checkpoint_verify(golden_path(path, name), NULL, NULL, SAID));
        CHECK_MSG(!strstr(said, "do not tell"), "%s", said);
    }
}

/* ---- export ---------------------------------------------------------------------------------- */

/* drops names that contain `user` */
static int keep_names(void *user, const char *name, char *out) {
    snprintf(out, FSDP_CHECKPOINT_NAME, "%s", name);
    return strstr(name, (const char *)user) == NULL;
}
static int prefix_names(void *user, const char *name, char *out) {
    snprintf(out, FSDP_CHECKPOINT_NAME, "%s%s", (const char *)user, name);
    return 1;
}
static int one_name(void *user, const char *name, char *out) {
    (void)name;
    snprintf(out, FSDP_CHECKPOINT_NAME, "%s", (const char *)user);
    return 1;
}

static char *exported(char to[600], const char *golden_name, const char *name,
                      const fsdp_checkpoint_export_desc *d) {
    char from[600];
    export_to(golden_path(from, golden_name), path_of(to, name), d);
    return to;
}

/* A file of transformers is also a model of its own; exported again it has equal bytes. */
TEST(fsdpck, export_writes_the_bytes_of_safetensors) {
    char from[600], to[600], name[80];
    for (int i = 1; i <= 3; i++) {
        snprintf(name, sizeof name, "checkpoints/transformers_gpt2/model-%05d-of-00003.safetensors",
                 i);
        golden_path(from, name);
        snprintf(name, sizeof name, "out%d", i);
        export_to(from, path_of(to, name), NULL);
        CHECK_EQ_INT(h_entries(to), 2 + 1);
        same_file(to, "model.safetensors", from, "");
    }
}

/* Whatever number of ranks and mesh has saved it: one file with equal bytes. */
TEST(fsdpck, export_joins_shards) {
    static const char *const others[] = {"torch_fsdp_w3", "torch_fsdp_w4", "torch_hsdp_2x2",
                                         "torch_ddp_w2", "torch_2d_2x2"};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char first[600], to[600], name[80], params[600], joined[600];
    d.with_optimizer = 1;
    exported(first, "checkpoints/torch_fsdp_w1", "first", &d);
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof name, "checkpoints/%s", others[i]);
        exported(to, name, others[i], &d);
        same_file(to, "model.safetensors", first, "model.safetensors");
    }
    d.with_optimizer = 0; /* compared with PyTorch's own export, which leaves out empty tensors */
    d.rename = keep_names, d.user = (void *)(uintptr_t) ".none";
    exported(params, "checkpoints/torch_fsdp_w3", "params", &d);
    exported(joined, "checkpoints/torch_consolidated", "joined", NULL);
    same_file(params, "model.safetensors", joined, "model.safetensors");
}

static const struct {
    const char *name;
    int64_t limit;
    int num;
    int64_t rows[6];
    int files, file[6];
} splits[] = {{"all_in_one", 100, 3, {1, 2, 3}, 1, {1, 1, 1}},
              {"just_fits", 24, 3, {1, 2, 3}, 1, {1, 1, 1}},
              {"one_byte_less", 23, 3, {1, 2, 3}, 2, {1, 1, 2}},
              {"each_alone", 12, 3, {3, 2, 3}, 3, {1, 2, 3}},
              {"large_between", 12, 4, {1, 4, 2, 1}, 3, {2, 1, 2, 3}},
              {"large_first", 4, 3, {2, 1, 1}, 3, {1, 2, 3}},
              {"large_last", 8, 3, {1, 1, 3}, 2, {2, 2, 1}},
              {"large_ones", 4, 3, {2, 2, 2}, 3, {1, 2, 3}},
              {"large_then_full", 8, 5, {1, 3, 1, 3, 1}, 4, {3, 1, 3, 2, 4}},
              {"empty_ones", 4, 4, {0, 1, 0, 1}, 2, {1, 1, 1, 2}}};
TEST_P(fsdpck, splits, splits) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    fsdp_safetensors_entry e[6];
    char from[600], to[600], file[80], index[2000], line[200];
    static const char *const names[] = {"a", "b", "c", "d", "e", "f"};
    int64_t total = 0;
    for (int i = 0; i < row->num; i++) {
        e[i] = tensor(names[i], FSDP_F32, 1, row->rows[i], 0, 0);
        total += 4 * row->rows[i];
    }
    store_tensors(h_tmpdir(), "from.safetensors", e, row->num);
    d.max_file_bytes = row->limit;
    export_to(path_of(from, "from.safetensors"), path_of(to, "to"), &d);
    CHECK_EQ_INT(h_entries(to), 2 + row->files + (row->files > 1));
    snprintf(index, sizeof index,
             "{\n  \"metadata\": {\n    \"total_size\": %d\n  },\n  \"weight_map\": {", (int)total);
    for (int i = 0; i < row->num; i++) {
        snprintf(file, sizeof file, "model-%05d-of-%05d.safetensors", row->file[i], row->files);
        if (row->files == 1) snprintf(file, sizeof file, "model.safetensors");
        snprintf(line, sizeof line, "%s\n    \"%s\": \"%s\"", i ? "," : "", names[i], file);
        strcat(index, line);
        char path[700];
        snprintf(path, sizeof path, "%s/%s", to, file);
        fsdp_checkpoint_reader *r = open_it(path);
        (void)index_of(r, names[i]);
        fsdp_checkpoint_close(r);
    }
    strcat(index, "\n  }\n}");
    if (row->files > 1) {
        blob b = load(to, "model.safetensors.index.json");
        CHECK_EQ_STR(b.at, index);
        free(b.at);
    }
    d.max_file_bytes = 0; /* joined again */
    char again[600], direct[600];
    export_to(to, path_of(again, "again"), &d);
    export_to(from, path_of(direct, "direct"), &d);
    same_file(again, "model.safetensors", direct, "model.safetensors");
}

/* Tensors larger than a piece, sharded in each dim; pieces that end within a row. */
TEST(fsdpck, export_in_pieces) {
    fsdp_safetensors_entry e[5] = {
        tensor("deep", FSDP_F32, 3, 3, 701, 601), tensor("wide", FSDP_F32, 2, 2, 1300001, 0),
        tensor("bytes", FSDP_U8, 1, 4194303, 0, 0), tensor("halves", FSDP_BF16, 2, 1500000, 3, 0),
        tensor("one", FSDP_I64, 1, 1, 0, 0)};
    static const int ranks[] = {1, 2, 3, 7};
    fsdp_checkpoint_export_desc d = FSDP_ZERO, plain = FSDP_ZERO;
    char from[600], direct[600], cut[600], again[600], name[40];
    store_tensors(h_tmpdir(), "from.safetensors", e, 5);
    export_to(path_of(from, "from.safetensors"), path_of(direct, "direct"), NULL);
    fsdp_checkpoint_reader *r = open_it(direct);
    char *x = (char *)malloc(16000000), *y = (char *)malloc(16000000);
    CHECK(x && y);
    fsdp_checkpoint_reader *s = open_it(from);
    for (int64_t i = 0; i < 5; i++) {
        fsdp_checkpoint_tensor t;
        CHECK_OK(fsdp_checkpoint_tensor_at(s, i, &t));
        CHECK_OK(fsdp_checkpoint_read(s, i, NULL, NULL, FSDP_DTYPE_KEEP, x, SAID));
        CHECK_OK(fsdp_checkpoint_read(r, i, NULL, NULL, FSDP_DTYPE_KEEP, y, SAID));
        CHECK_EQ_MEM(x, y, (size_t)t.nbytes);
    }
    fsdp_checkpoint_close(s);
    fsdp_checkpoint_close(r);
    free(x);
    free(y);
    for (int i = 0; i < 4; i++) {
        fsdp_checkpoint_contents c;
        d.num_ranks = ranks[i];
        snprintf(name, sizeof name, "cut%d", i);
        export_to(from, path_of(cut, name), &d);
        CHECK_EQ_INT(h_entries(cut), 2 + ranks[i] + 1);
        CHECK_OK(fsdp_checkpoint_verify(cut, NULL, NULL, SAID));
        r = open_it(cut);
        CHECK_OK(fsdp_checkpoint_contents_of(r, &c));
        /* "one" and, with more ranks than rows, "deep" and "wide" are in one file */
        CHECK_EQ_INT(c.num_boxes, 1 + 2 * ranks[i] + (ranks[i] > 3 ? 1 : ranks[i]) +
                                      (ranks[i] > 2 ? 1 : ranks[i]));
        fsdp_checkpoint_close(r);
        snprintf(name, sizeof name, "again%d", i);
        export_to(cut, path_of(again, name), &plain);
        same_file(again, "model.safetensors", direct, "model.safetensors");
    }
}

/* Parameters become bf16, rounded as by fsdp_convert; states keep their dtypes. */
TEST(fsdpck, export_converts) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char to[600];
    float w[6];
    uint16_t narrow[6], got[6];
    double step;
    fsdp_checkpoint_tensor t;
    d.dtype = FSDP_BF16, d.with_optimizer = 1;
    exported(to, "example/step-00000017", "to", &d);
    fsdp_checkpoint_reader *r = open_it(to);
    char path[600];
    fsdp_checkpoint_reader *s = open_it(golden_path(path, "example/step-00000017"));
    CHECK_OK(fsdp_checkpoint_read(s, index_of(s, "h.0.w"), NULL, NULL, FSDP_F32, w, SAID));
    CHECK_OK(fsdp_convert(narrow, FSDP_BF16, w, FSDP_F32, 6));
    CHECK_OK(fsdp_checkpoint_tensor_at(r, index_of(r, "h.0.w"), &t));
    CHECK_EQ_INT(t.dtype, FSDP_BF16);
    CHECK_OK(fsdp_checkpoint_read(r, index_of(r, "h.0.w"), NULL, NULL, FSDP_DTYPE_KEEP, got, SAID));
    CHECK_EQ_MEM(got, narrow, sizeof got);
    CHECK_OK(fsdp_checkpoint_tensor_at(r, index_of(r, "optim.state.h.0.w.exp_avg"), &t));
    CHECK_EQ_INT(t.dtype, FSDP_F32);
    CHECK_OK(fsdp_checkpoint_read(r, index_of(r, "optim.state.h.0.w.step"), NULL, NULL,
                                  FSDP_DTYPE_KEEP, &step, SAID));
    CHECK(step == 17);
    fsdp_checkpoint_close(r);
    fsdp_checkpoint_close(s);
    exported(to, "example/step-00000017", "params", NULL); /* without states and blobs */
    r = open_it(to);
    CHECK_STATUS(fsdp_checkpoint_tensor_at(r, 2, &t), FSDP_ERR_INVALID_ARG);
    fsdp_checkpoint_close(r);
}

/* Averages replace the parameters that have one, in the parameter's dtype or another. */
static void check_average(const char *dir, const char *name, const fsdp_checkpoint_reader *of,
                          const char *from, fsdp_dtype dtype, int64_t numel) {
    char want[256], got[256];
    fsdp_checkpoint_tensor t;
    fsdp_checkpoint_reader *r = open_it(dir);
    CHECK_OK(fsdp_checkpoint_tensor_at(r, index_of(r, name), &t));
    CHECK(t.dtype == dtype && t.nbytes == numel * (int64_t)fsdp_dtype_size(dtype));
    CHECK_OK(fsdp_checkpoint_read(r, index_of(r, name), NULL, NULL, FSDP_DTYPE_KEEP, got, SAID));
    CHECK_OK(fsdp_checkpoint_read((fsdp_checkpoint_reader *)(uintptr_t)of, index_of(of, from), NULL,
                                  NULL, dtype, want, SAID));
    CHECK_EQ_MEM(got, want, (size_t)t.nbytes);
    fsdp_checkpoint_close(r);
}
/* Writes parameters and states; the average of b, which has 5 rows, has `rows`. */
static void store_averages(const char *dir, int num, int64_t rows) {
    fsdp_safetensors_entry e[] = {tensor("a.w", FSDP_BF16, 2, 3, 4, 0),
                                  tensor("b", FSDP_F32, 1, 5, 0, 0),
                                  tensor("c", FSDP_F32, 1, 2, 0, 0),
                                  tensor("n", FSDP_I32, 1, 2, 0, 0),
                                  tensor("optim.state.a.w.ema", FSDP_F32, 2, 3, 4, 0),
                                  tensor("optim.state.a.w.ema_step", FSDP_F64, 0, 0, 0, 0),
                                  tensor("optim.state.b.ema", FSDP_F32, 1, rows, 0, 0)};
    store_tensors(dir, "model.safetensors", e, num);
}
TEST(fsdpck, export_averages) {
    char from[600], file[640], to[600];
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    fsdp_checkpoint_tensor t;
    path_of(from, "from");
    CHECK_EQ_INT(mkdir(from, 0700), 0);
    store_averages(from, 7, 5);
    snprintf(file, sizeof file, "%s/model.safetensors", from);
    fsdp_checkpoint_reader *r = open_it(file);
    d.ema = 1;
    export_to(file, path_of(to, "average"), &d);
    check_average(to, "a.w", r, "optim.state.a.w.ema", FSDP_BF16, 12);
    check_average(to, "b", r, "optim.state.b.ema", FSDP_F32, 5);
    check_average(to, "c", r, "c", FSDP_F32, 2);
    check_average(to, "n", r, "n", FSDP_I32, 2);
    fsdp_checkpoint_reader *all = open_it(to);
    CHECK_STATUS(fsdp_checkpoint_tensor_at(all, 4, &t), FSDP_ERR_INVALID_ARG);
    fsdp_checkpoint_close(all);
    d.dtype = FSDP_F32, d.with_optimizer = 1, d.max_file_bytes = 60;
    export_to(file, path_of(to, "wide"), &d);
    check_average(to, "a.w", r, "optim.state.a.w.ema", FSDP_F32, 12);
    check_average(to, "optim.state.a.w.ema", r, "optim.state.a.w.ema", FSDP_F32, 12);
    fsdp_checkpoint_close(r);
    d.num_ranks = 2;
    CHECK_STATUS(fsdp_checkpoint_export(file, path_of(to, "no"), &d, SAID), FSDP_ERR_INVALID_ARG);
    says("[E463] checkpoint_export: num_ranks: expected 0 with ema, ");
    d.num_ranks = 0;
    store_averages(from, 7, 6);
    CHECK_STATUS(fsdp_checkpoint_export(file, to, &d, SAID), FSDP_ERR_CORRUPT);
    says("[E481] checkpoint_export: 'optim.state.b.ema' is no average of 'b'");
    store_averages(from, 4, 5);
    CHECK_STATUS(fsdp_checkpoint_export(file, to, &d, SAID), FSDP_ERR_INVALID_ARG);
    says("[E482] checkpoint_export: ");
}

/* An average has as many dims as its parameter, at most all of them, and both are floats. */
TEST(fsdpck, export_of_odd_averages) {
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_I32};
    char from[600], to[600];
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    d.ema = 1;
    path_of(from, "model.safetensors"), path_of(to, "to");
    for (int ndim = 1; ndim <= FSDP_MAX_DIMS; ndim++)
        for (int kind = 0; kind < 4; kind++) {
            fsdp_safetensors_entry e[] = {
                tensor("optim.state.w.ema", dtypes[kind / 2], ndim, 2, 1, 3),
                tensor("w", dtypes[kind % 2], ndim, 2, 1, 3)};
            for (int i = 0; i < 2; i++)
                for (int dim = 3; dim < ndim; dim++) e[i].shape[dim] = dim % 2 + 1;
            store_tensors(h_tmpdir(), "model.safetensors", e, 2);
            CHECK_STATUS(fsdp_checkpoint_export(from, to, &d, SAID),
                         kind ? FSDP_ERR_CORRUPT : FSDP_OK);
            if (kind) says("[E481] checkpoint_export: 'optim.state.w.ema' is no average of 'w'");
            h_remove_tree(to);
        }
}

/* A unit may have the name "optim": its parameters are no states, and may have an average. */
TEST(fsdpck, export_of_a_unit_optim) {
    fsdp_safetensors_entry e[] = {tensor("optim.w", FSDP_BF16, 1, 5, 0, 0),
                                  tensor("optim.state.optim.w.ema", FSDP_F32, 1, 5, 0, 0),
                                  tensor("optim.state.optim.w.step", FSDP_F64, 0, 0, 0, 0)};
    char from[600], file[640], to[600];
    fsdp_checkpoint_tensor t;
    path_of(from, "from");
    CHECK_EQ_INT(mkdir(from, 0700), 0);
    store_tensors(from, "model.safetensors", e, 3);
    snprintf(file, sizeof file, "%s/model.safetensors", from);
    fsdp_checkpoint_reader *r = open_it(file);
    for (int how = 0; how < 4; how++) {
        static const char *const names[] = {"weights", "averages", "all_weights", "all_averages"};
        fsdp_checkpoint_export_desc d = FSDP_ZERO;
        d.ema = how & 1, d.with_optimizer = how >> 1, d.dtype = FSDP_F32;
        export_to(file, path_of(to, names[how]), &d);
        check_average(to, "optim.w", r, d.ema ? "optim.state.optim.w.ema" : "optim.w", FSDP_F32, 5);
        fsdp_checkpoint_reader *all = open_it(to);
        CHECK_OK(fsdp_checkpoint_tensor_at(all, how >> 1 ? 2 : 0, &t));
        CHECK_STATUS(fsdp_checkpoint_tensor_at(all, how >> 1 ? 3 : 1, &t), FSDP_ERR_INVALID_ARG);
        fsdp_checkpoint_close(all);
    }
    fsdp_checkpoint_close(r);
}

/* ---- export to the layout of a directory ----------------------------------------------------- */

/* The inverse of a `source`: new tensors of rows of old ones, compared element by element with the
   definition of a load: part `k` of the old tensor is rows `first`.. of the new one, transposed or
   not. */
typedef struct mapping {
    char from[16], to[16];
    int transpose;
    int64_t first, rows; /* rows 0: not given */
} mapping;
typedef struct mapped {
    const mapping *list;
    int num;
    fsdp_dtype dtype; /* of all old tensors, which are matrices; KEEP: any tensors */
} mapped;
static int mapped_source(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    const mapped *m = (const mapped *)user;
    int num = 0;
    int64_t numel = 1;
    for (int d = 0; d < v->ndim; d++) numel *= v->shape[d];
    CHECK_EQ_STR(out[0].name, v->name);
    CHECK(!v->unit && !*v->unit_name && !v->data && !v->shard);
    CHECK(v->ordinal == -1 && v->index == -1 && v->dtype == v->grad_dtype && v->numel == numel);
    CHECK_EQ_MEM(v->shape, v->local_shape, sizeof v->shape);
    CHECK(m->dtype == FSDP_DTYPE_KEEP || (v->dtype == m->dtype && v->ndim == 2 && numel > 0));
    for (int i = 0; i < m->num; i++) {
        if (strcmp(m->list[i].from, v->name) != 0) continue;
        snprintf(out[num].name, sizeof out->name, "%s", m->list[i].to);
        out[num].transpose = m->list[i].transpose;
        out[num].first = m->list[i].first;
        out[num++].rows = m->list[i].rows;
    }
    return num;
}
/* Returns a tensor's elements and their size: floating ones as f32, others as they are. */
static char *values_of(fsdp_checkpoint_reader *r, const char *name, fsdp_checkpoint_tensor *t,
                       size_t *size) {
    CHECK_OK(fsdp_checkpoint_tensor_at(r, index_of(r, name), t));
    const int floats = fsdp_dtype_is_float(t->dtype);
    int64_t numel = 1;
    for (int d = 0; d < t->ndim; d++) numel *= t->shape[d];
    char *room = (char *)malloc(2 * (size_t)t->nbytes + 1);
    CHECK(room != NULL);
    CHECK_OK(fsdp_checkpoint_read(r, index_of(r, name), NULL, NULL,
                                  floats ? FSDP_F32 : FSDP_DTYPE_KEEP, room, SAID));
    *size = floats ? 4 : (size_t)(t->nbytes / numel);
    return room;
}
/* Every row of every old tensor is where the mapping puts it; the counts show that nothing else is
   there. dtype: that of the export. */
static void check_mapping(const char *from, const char *to, const mapped *m, fsdp_dtype dtype) {
    fsdp_checkpoint_reader *a = open_it(from), *b = open_it(to);
    fsdp_checkpoint_contents c;
    int64_t placed = 0, row = 0;
    for (int i = 0; i < m->num; i++) {
        const mapping *p = &m->list[i];
        fsdp_checkpoint_tensor x, y;
        size_t size, new_size;
        char *old = values_of(a, p->from, &x, &size), *fresh = values_of(b, p->to, &y, &new_size);
        int64_t columns = 1, rows = p->rows ? p->rows : x.shape[0], numel = y.shape[0];
        for (int d = 1; d < x.ndim; d++) columns *= x.shape[d], numel *= y.shape[d];
        if (i == 0 || strcmp(m->list[i - 1].from, p->from) != 0) row = 0; /* parts in their order */
        CHECK(y.ndim == x.ndim && size == new_size);
        if (dtype != FSDP_DTYPE_KEEP) CHECK_EQ_INT(y.dtype, dtype);
        else CHECK_EQ_INT(y.file_dtype, x.file_dtype);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < columns; k++) {
                int64_t at = (p->first + r) * columns + k;
                if (p->transpose) at = k * y.shape[1] + p->first + r;
                CHECK_MSG(!memcmp(fresh + at * (int64_t)size,
                                  old + ((row + r) * columns + k) * (int64_t)size, size),
                          "%s row %lld column %lld", p->from, (long long)r, (long long)k);
            }
        row += rows;
        placed += rows * columns * (y.nbytes / numel);
        free(old);
        free(fresh);
    }
    CHECK_OK(fsdp_checkpoint_contents_of(b, &c));
    CHECK_EQ_INT(c.data_bytes, placed);
    fsdp_checkpoint_close(a);
    fsdp_checkpoint_close(b);
}

/* Random mappings: rows of 1 to 3 old tensors, in random order, are those of 1 to 4 new ones. With
   `like` the last rows of each new tensor need no number. */
TEST(fsdpck, export_inverts_sources) {
    uint64_t z = h_seed();
#define UP_TO(n) (1 + (int)((z = golden_splitmix64(z)) >> 33) % (n))
    for (int round = 0; round < 100; round++) {
        fsdp_checkpoint_export_desc d = FSDP_ZERO;
        static const struct {
            fsdp_dtype dtype, to;
            const char *foreign;
        } kinds[] = {{FSDP_F32, FSDP_DTYPE_KEEP, NULL},
                     {FSDP_BF16, FSDP_DTYPE_KEEP, NULL},
                     {FSDP_BF16, FSDP_F32, NULL},
                     {FSDP_I64, FSDP_F32, NULL},
                     {FSDP_SAFETENSORS_OTHER, FSDP_BF16, "U16"},
                     {FSDP_SAFETENSORS_OTHER, FSDP_BF16, "F8_E4M3"}};
        const int kind = round % 6;
        fsdp_safetensors_entry e[3];
        mapping list[24], parts[24], full[24], untold_last[24];
        int64_t rows[3] = {0, 0, 0}, new_rows[4];
        int num_old = UP_TO(3), num_new = UP_TO(4), num = 0, columns = UP_TO(4);
        char from[600], to[600], again[600], name[40];
        for (int j = 0; j < num_new; j++) {
            int64_t first = 0;
            int transpose = UP_TO(2) - 1, count = UP_TO(3);
            for (int k = 0; k < count; k++) {
                mapping *p = &parts[num++];
                memset(p, 0, sizeof *p);
                snprintf(p->to, sizeof p->to, "new.%d", j);
                p->transpose = transpose, p->first = first, p->rows = UP_TO(5);
                new_rows[j] = first += p->rows;
            }
        }
        for (int i = num - 1; i > 0; i--) { /* shuffled, then dealt to the old tensors */
            int k = UP_TO(i + 1) - 1;
            mapping swapped = parts[i];
            parts[i] = parts[k], parts[k] = swapped;
        }
        if (num_old > num) num_old = num;
        mapped m = {list, 0, FSDP_DTYPE_KEEP};
        for (int j = 0; j < num_old; j++) {
            int untold = UP_TO(9) - 1, mine = 0;
            for (int i = j; i < num && mine < 8; i += num_old, mine++) {
                snprintf(parts[i].from, sizeof parts[i].from, "old.%d", j);
                rows[j] += parts[i].rows;
                list[m.num] = full[m.num] = untold_last[m.num] = parts[i];
                if (mine == untold) list[m.num].rows = 0; /* what the others leave */
                if (parts[i].first + parts[i].rows == new_rows[parts[i].to[4] - '0'])
                    untold_last[m.num].rows = 0;
                m.num++;
            }
        }
        if (m.num < num) continue; /* more than eight parts */
        static const char *const names[] = {"old.0", "old.1", "old.2"};
        for (int j = 0; j < num_old; j++)
            e[j] = kinds[kind].foreign
                       ? foreign(names[j], kinds[kind].foreign, 2, rows[j], columns)
                       : tensor(names[j], kinds[kind].dtype, 2, rows[j], columns, 0);
        m.dtype = kinds[kind].dtype;
        snprintf(name, sizeof name, "old%d.safetensors", round);
        store_tensors(h_tmpdir(), name, e, num_old);
        path_of(from, name);
        snprintf(name, sizeof name, "new%d", round);
        d.source = mapped_source, d.user = &m;
        d.dtype = kinds[kind].to;
        export_to(from, path_of(to, name), &d);
        m.list = full;
        check_mapping(from, to, &m, fsdp_dtype_is_float(m.dtype) ? d.dtype : FSDP_DTYPE_KEEP);
        m.list = untold_last;
        d.like = to;
        snprintf(name, sizeof name, "again%d", round);
        export_to(from, path_of(again, name), &d);
        same_file(to, "model.safetensors", again, "model.safetensors");
    }
#undef UP_TO
}

/* Parts that are larger than a piece, rows that are longer than one; three dims, one, and none. */
TEST(fsdpck, export_inverts_large_sources) {
    fsdp_safetensors_entry e[7] = {
        tensor("long", FSDP_F32, 2, 1100001, 2, 0), tensor("cube", FSDP_F32, 3, 5, 7, 3),
        tensor("q", FSDP_F32, 2, 1201, 900, 0),     tensor("k", FSDP_F32, 2, 301, 900, 0),
        tensor("one", FSDP_F32, 0, 0, 0, 0),        tensor("bias", FSDP_F32, 1, 5, 0, 0),
        tensor("left", FSDP_F32, 1, 5, 0, 0)};
    static const mapping list[] = {{"long", "flat", 1, 0, 0},  {"cube", "b", 0, 0, 2},
                                   {"cube", "a", 0, 0, 3},     {"q", "c_attn", 1, 301, 0},
                                   {"k", "c_attn", 1, 0, 301}, {"bias", "c", 0, 0, 5}};
    mapped m = {list, (int)(sizeof list / sizeof *list), FSDP_DTYPE_KEEP};
    mapping some[8];
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], to[600];
    store_tensors(h_tmpdir(), "from.safetensors", e, 7);
    path_of(from, "from.safetensors");
    d.source = mapped_source, d.user = &m;
    export_to(from, path_of(to, "to"), &d); /* "one" and "left" have no source: they are left out */
    check_mapping(from, to, &m, d.dtype);
    memcpy(some, list, sizeof list); /* a tensor without dims has a name */
    static const mapping scale = {"one", "scale", 0, 0, 0};
    some[6] = scale;
    m.list = some, m.num = 7;
    export_to(from, path_of(to, "scaled"), &d);
    fsdp_checkpoint_reader *r = open_it(to);
    fsdp_checkpoint_tensor t;
    CHECK_OK(fsdp_checkpoint_tensor_at(r, index_of(r, "scale"), &t));
    CHECK(t.ndim == 0 && t.nbytes == 4);
    fsdp_checkpoint_close(r);
}

TEST(fsdpck, export_refuses_sources) {
    static const struct {
        mapping list[9];
        int num;
        const char *says;
    } bad[] = {
        {{{"w", "x", 0, 0, 2}},
         1,
         "[E484] checkpoint_export: source takes 'w' apart into 1 tensors"},
        {{{"w", "x", 0, 0, 4}}, 1, "whose rows are not its 3: expected at most 8 tensors"},
        {{{"w", "x", 0, 0, -1}}, 1, "[E484]"},
        {{{"w", "x", 0, -1, 0}}, 1, "[E484]"},
        {{{"w", "x", 0, INT64_MAX, 0}}, 1, "[E484]"},
        {{{"w", "x", 0, 0, INT64_MAX}, {"w", "y", 0, 0, INT64_MAX}}, 2, "[E484]"},
        {{{"w", "x", 0, 0, 0}, {"w", "y", 0, 0, 0}}, 2, "set `rows` of each, or `like`"},
        {{{"w", "a", 0, 0, 1},
          {"w", "b", 0, 0, 1},
          {"w", "c", 0, 0, 1},
          {"w", "d", 0, 0, 0},
          {"w", "e", 0, 0, 0},
          {"w", "f", 0, 0, 0},
          {"w", "g", 0, 0, 0},
          {"w", "h", 0, 0, 0}},
         8,
         "[E484]"},
        {{{"w", "x", 0, 1, 0}},
         1,
         "[E486] checkpoint_export: 'w' gives rows 1..4 of 'x', expected row 0 next"},
        {{{"w", "x", 0, 0, 0}, {"v", "x", 0, 4, 0}},
         2,
         "'v' gives rows 4..6 of 'x', expected row 3"},
        {{{"w", "x", 0, 0, 0}, {"v", "x", 0, 2, 0}},
         2,
         "'v' gives rows 2..4 of 'x', expected row 3"},
        {{{"w", "x", 0, 0, 0}, {"v", "x", 1, 3, 0}}, 2, "'v' gives rows 3..5 of 'x', transposed"},
        {{{"w", "x", 0, 0, 0}, {"other", "x", 0, 3, 0}}, 2, "'other' gives rows 3..5"},
        {{{"w", "x", 0, 0, 0}, {"half", "x", 0, 3, 0}}, 2, "'half' gives rows 3..5"},
        {{{"w", "x", 0, 0, 0}, {"b", "x", 0, 3, 0}}, 2, "'b' gives rows 3..5"},
        {{{"b", "x", 0, 0, 0}, {"w", "x", 0, 2, 0}}, 2, "'w' gives rows 2..5"},
        {{{"f8", "x", 0, 0, 0}, {"other_f8", "x", 0, 2, 0}}, 2, "'other_f8' gives rows 2..4"},
        {{{"f8", "x", 0, 0, 0}, {"u8", "x", 0, 2, 0}}, 2, "'u8' gives rows 2..4"},
        {{{"u8", "x", 0, 0, 0}, {"f8", "x", 0, 2, 0}}, 2, "'f8' gives rows 2..4"},
        {{{"b", "x", 1, 0, 0}}, 1, "'b' gives rows 0..2 of 'x', transposed, expected row 0 next"},
        {{{"one", "x", 0, 0, 0}, {"two", "x", 0, 1, 0}}, 2, "'two' gives rows 1..2 of 'x'"},
        {{{"w", "", 0, 0, 0}}, 1, "[E466]"}};
    fsdp_safetensors_entry e[10] = {
        tensor("w", FSDP_F32, 2, 3, 2, 0),       tensor("v", FSDP_F32, 2, 2, 2, 0),
        tensor("other", FSDP_F32, 2, 2, 3, 0),   tensor("half", FSDP_BF16, 2, 2, 2, 0),
        tensor("b", FSDP_F32, 1, 2, 0, 0),       tensor("one", FSDP_F32, 0, 0, 0, 0),
        tensor("two", FSDP_F32, 0, 0, 0, 0),     foreign("f8", "F8_E4M3", 2, 2, 2),
        foreign("other_f8", "F8_E5M2", 2, 2, 2), tensor("u8", FSDP_U8, 2, 2, 2, 0)};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], to[600];
    mapped m = {NULL, 0, FSDP_DTYPE_KEEP};
    store_tensors(h_tmpdir(), "from.safetensors", e, 10);
    path_of(from, "from.safetensors"), path_of(to, "to");
    d.source = mapped_source, d.user = &m;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        m.list = bad[i].list, m.num = bad[i].num;
        CHECK_STATUS(fsdp_checkpoint_export(from, to, &d, SAID), FSDP_ERR_INVALID_ARG);
        says(bad[i].says);
        CHECK_EQ_INT(h_entries(h_tmpdir()), 3);
    }
    static const mapping mixed[] = {{"w", "x", 0, 0, 0}, {"half", "x", 0, 3, 0}};
    m.list = mixed, m.num = 2, d.dtype = FSDP_F32; /* in one dtype they are one tensor */
    export_to(from, to, &d);
    check_mapping(from, to, &m, d.dtype);
    d.num_ranks = 2;
    CHECK_STATUS(fsdp_checkpoint_export(from, to, &d, SAID), FSDP_ERR_INVALID_ARG);
    says("[E463] checkpoint_export: num_ranks: expected 0 with ema, source, like");
    static const mapping cut[] = {{"w", "b", 0, 0, 0}, {"w", "two", 0, 0, 0}};
    m.list = cut, d.num_ranks = 0, d.like = from; /* its tensor "two" has no rows */
    CHECK_STATUS(fsdp_checkpoint_export(from, path_of(to, "cut"), &d, SAID), FSDP_ERR_INVALID_ARG);
    says("[E484] checkpoint_export: source takes 'w' apart");
    static const mapping absent[] = {{"w", "b", 0, 0, 0}, {"w", "absent", 0, 0, 0}};
    m.list = absent; /* "b" has 2 of 3 rows */
    CHECK_STATUS(fsdp_checkpoint_export(from, to, &d, SAID), FSDP_ERR_INVALID_ARG);
    says("[E484] checkpoint_export: source takes 'w' apart");
}

/* A directory of Hugging Face: its tensors, and files of all kinds next to them. */
static const char *const copied_files[] = {"config.json",
                                           "generation_config.json",
                                           "tokenizer.json",
                                           "tokenizer_config.json",
                                           "tokenizer.model",
                                           "special_tokens_map.json",
                                           "vocab.json",
                                           "merges.txt",
                                           "chat_template.jinja",
                                           "preprocessor_config.json",
                                           "README.md",
                                           "LICENSE",
                                           "1_Pooling/config.json",
                                           "additional_chat_templates/tool_use.jinja",
                                           "a/b/c/d/deep.txt"};
static const char *const left_files[] = {".gitattributes",
                                         "pytorch_model.bin",
                                         "pytorch_model.bin.index.json",
                                         "training_args.bin",
                                         "x.gguf",
                                         "optimizer.pt",
                                         "rng_state.pth",
                                         "tf_model.h5",
                                         "flax_model.msgpack",
                                         "rust_model.ot",
                                         "onnx/model.onnx",
                                         "onnx/model.onnx_data",
                                         "2_Dense/model.safetensors",
                                         "manifest.json.d/.hidden",
                                         "a/b/c/d/e/too_deep.txt"};
enum { COPIED = 15, LEFT = 15 };
static void store_deep(const char *dir, const char *leaf) {
    char path[800];
    snprintf(path, sizeof path, "%s/%s", dir, leaf);
    for (char *c = path + strlen(dir) + 1; (c = strchr(c, '/')) != NULL; *c++ = '/') {
        *c = 0;
        CHECK(!mkdir(path, 0700) || errno == EEXIST);
    }
    store(dir, leaf, leaf, (int64_t)strlen(leaf)); /* its name is its content */
}
static const char *like_dir(char out[600], fsdp_safetensors_entry *e, int n) {
    CHECK_EQ_INT(mkdir(path_of(out, "like"), 0700), 0);
    store_tensors(out, "model.safetensors", e, n);
    for (int i = 0; i < COPIED; i++) store_deep(out, copied_files[i]);
    for (int i = 0; i < LEFT; i++) store_deep(out, left_files[i]);
    char large[800];
    snprintf(large, sizeof large, "%s/tokenizer.json", out); /* larger than a piece */
    CHECK_EQ_INT(truncate(large, 5000001), 0);
    return out;
}
static int num_names(const char *dir) { /* of files, in all levels */
    struct dirent *entry;
    int num = 0;
    DIR *d = opendir(dir);
    while (d && (entry = readdir(d)) != NULL) {
        char path[1200];
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        if (entry->d_name[0] == '.' && (!entry->d_name[1] || entry->d_name[1] == '.')) continue;
        struct stat st;
        CHECK_EQ_INT(stat(path, &st), 0);
        num += S_ISDIR(st.st_mode) ? num_names(path) : 1;
        CHECK_MSG(!S_ISDIR(st.st_mode) || num_names(path) > 0, "%s is empty", path);
    }
    if (d) closedir(d);
    return num;
}

TEST(fsdpck, export_like_copies_files) {
    fsdp_safetensors_entry e[2] = {tensor("a", FSDP_F32, 2, 3, 4, 0),
                                   tensor("optim.state.a.step", FSDP_F64, 0, 0, 0, 0)};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char like[600], to[600], file[700], path[1300];
    like_dir(like, e, 2); /* states there do not count */
    store(like, "manifest.json", "x", 1);
    snprintf(file, sizeof file, "%s/model.safetensors", like);
    d.like = like;
    CHECK_STATUS(fsdp_checkpoint_export(file, path_of(to, "no"), &d, SAID), FSDP_ERR_CORRUPT);
    says("manifest.json: "); /* a checkpoint of ours would be damaged */
    snprintf(path, sizeof path, "%s/manifest.json", like);
    CHECK_EQ_INT(unlink(path), 0);
    d.file_name = "adapter_model.safetensors";
    export_to(file, path_of(to, "to"), &d);
    for (int i = 0; i < COPIED; i++) same_file(to, copied_files[i], like, copied_files[i]);
    CHECK_EQ_INT(num_names(to), COPIED + 1);
    fsdp_checkpoint_close(open_it(to));
    snprintf(path, sizeof path, "%s/%s", to, d.file_name);
    CHECK_EQ_INT(access(path, F_OK), 0);
    d.like = file; /* a file has no others next to it */
    export_to(file, path_of(to, "alone"), &d);
    CHECK_EQ_INT(num_names(to), 1);
    d.like = like;
    static const char *const bad[] = {"x", ".safetensors", "a/b.safetensors",
                                      ("12345678901234567890123456789012345678901234567890123."
                                       "safetensors")};
    for (int i = 0; i < 4; i++) {
        d.file_name = bad[i];
        CHECK_STATUS(fsdp_checkpoint_export(file, path_of(to, "x"), &d, SAID),
                     FSDP_ERR_INVALID_ARG);
        says("[E463] checkpoint_export: file_name: expected NULL or NAME.safetensors with at most "
             "64");
    }
    d.file_name = NULL, d.like = "";
    CHECK_STATUS(fsdp_checkpoint_export(file, to, &d, SAID), FSDP_ERR_INVALID_ARG);
    says("[E460] checkpoint_export: like is NULL, empty");
    d.like = "/nowhere";
    CHECK_STATUS(fsdp_checkpoint_export(file, to, &d, SAID), FSDP_ERR_IO);
    says("/nowhere: there is no such file or directory");
    d.like = like; /* a name that points at nothing */
    snprintf(path, sizeof path, "%s/additional_chat_templates/link", like);
    CHECK_EQ_INT(symlink("nothing", path), 0);
    CHECK_STATUS(fsdp_checkpoint_export(file, to, &d, SAID), FSDP_ERR_IO);
    says("additional_chat_templates/link: No such file");
    CHECK_EQ_INT(access(to, F_OK), -1);
    CHECK_EQ_INT(h_entries(h_tmpdir()), 2 + 3); /* like, to, alone */
}

static int may_lack_buffers(void *user, const char *name) {
    (void)user;
    return strstr(name, "inv_freq") != NULL;
}
/* Files of the caller take the place of those of `like`, and are written without it, too; tensors get
   the dtypes of `like`. */
TEST(fsdpck, export_texts) {
    static const fsdp_checkpoint_text texts[] = {{"config.json", "{}", 2}, {"new.txt", NULL, 0}};
    static const fsdp_checkpoint_text bad[] = {
        {NULL, "x", 1},
        {"", "x", 1},
        {"a/b", "x", 1},
        {".x", "x", 1},
        {"x", "x", -1},
        {"x", NULL, 1},
        {"w.safetensors", "", 0},
        {"w.bin", "x", 1},
        {"model.safetensors.index.json", "x", 1},
        {"manifest.json", "", 0},
        {"12345678901234567890123456789012345678901234567890123456789012345", "x", 1}};
    static const fsdp_dtype dtypes[] = {FSDP_BF16, FSDP_F32, FSDP_F16, FSDP_I32};
    fsdp_safetensors_entry e[4] = {
        tensor("a", FSDP_BF16, 2, 3, 4, 0), tensor("b", FSDP_F32, 1, 3, 0, 0),
        tensor("c", FSDP_F16, 1, 2, 0, 0), tensor("i", FSDP_I32, 1, 2, 0, 0)};
    fsdp_safetensors_entry plain[4] = {
        tensor("a", FSDP_F32, 2, 3, 4, 0), tensor("b", FSDP_F32, 1, 3, 0, 0),
        tensor("c", FSDP_F32, 1, 2, 0, 0), tensor("i", FSDP_I32, 1, 2, 0, 0)};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    fsdp_checkpoint_tensor t;
    char like[600], from[600], to[600];
    like_dir(like, e, 4);
    store_tensors(h_tmpdir(), "from.safetensors", plain, 4);
    path_of(from, "from.safetensors");
    d.like = like, d.dtype = FSDP_F64;
    for (int i = 0; i < 2; i++) {
        d.like_dtypes = i == 0;
        CHECK_OK(fsdp_checkpoint_export(from, path_of(to, i ? "wide" : "dtypes"), &d, SAID));
        if (i) says("[E493]");
        else CHECK_EQ_STR(said, "");
        fsdp_checkpoint_reader *reader = open_it(to);
        for (int k = 0; k < 4; k++) {
            CHECK_OK(fsdp_checkpoint_tensor_at(reader, k, &t));
            CHECK_EQ_INT(t.dtype, i && k < 3 ? FSDP_F64 : dtypes[k]);
        }
        fsdp_checkpoint_close(reader);
    }
    d.texts = texts, d.num_texts = 2; /* config.json tells the dtype */
    CHECK_OK(fsdp_checkpoint_export(from, path_of(to, "texts"), &d, SAID));
    CHECK_EQ_STR(said, "");
    store(h_tmpdir(), "want", "{}", 2), store(h_tmpdir(), "none", "", 0);
    same_file(to, "config.json", h_tmpdir(), "want");
    same_file(to, "new.txt", h_tmpdir(), "none");
    for (int i = 1; i < COPIED; i++) same_file(to, copied_files[i], like, copied_files[i]);
    CHECK_EQ_INT(num_names(to), COPIED + 2);
    d.like = NULL;
    CHECK_OK(fsdp_checkpoint_export(from, path_of(to, "alone"), &d, SAID));
    same_file(to, "config.json", h_tmpdir(), "want");
    CHECK_EQ_INT(num_names(to), 3);
    path_of(to, "no");
    for (size_t i = 0; i < sizeof bad / sizeof *bad + 4; i++) {
        const int more = (int)i - (int)(sizeof bad / sizeof *bad);
        d.texts = more < 0 ? &bad[i] : texts, d.num_texts = 1, d.num_ranks = 0, d.like_dtypes = 0;
        if (more == 0) d.num_texts = -1;
        if (more == 1) d.texts = NULL;
        if (more >= 2) d.num_ranks = 1;
        if (more == 3) d.num_texts = 0, d.like_dtypes = 1;
        CHECK_STATUS(fsdp_checkpoint_export(from, to, &d, SAID), FSDP_ERR_INVALID_ARG);
        says(more >= 2 ? "[E463] checkpoint_export: num_ranks: expected 0 with ema, source, like"
                       : "[E463] checkpoint_export: texts: expected names with at most 64 letters");
        CHECK_EQ_INT(access(to, F_OK), -1);
    }
}
/* Each difference fails by name before anything is written; another dtype is reported. */
TEST(fsdpck, export_like_compares) {
    static const struct {
        const char *name;
        fsdp_dtype dtype;
        int ndim;
        int64_t shape[3];
        const char *says;
    } rows[] = {
        {"a", FSDP_F32, 2, {3, 4}, ""},
        {"a",
         FSDP_F32,
         2,
         {4, 3},
         "[E491] checkpoint_export: 'a' is f32 [4, 3] in %s, and would be f32 [3, 4]: "},
        {"a", FSDP_F32, 1, {3}, "is f32 [3] in %s, and would be f32 [3, 4]"},
        {"a", FSDP_F32, 3, {3, 4, 1}, "is f32 [3, 4, 1] in %s, and would be "},
        {"a",
         FSDP_BF16,
         2,
         {3, 4},
         "[E493] checkpoint_export: tensors with another dtype than in %s: 'a': choose dtype"},
        {"c",
         FSDP_F32,
         2,
         {3, 4},
         "[E490] checkpoint_export: compared with %s, 1 tensors are missing: 'c', and 1 are extra: "
         "'a': correct their names"},
        {"a.inv_freq",
         FSDP_F32,
         1,
         {2},
         "0 tensors are missing, and 1 are "
         "extra: 'a'"},
        {"a", FSDP_F32, 2, {3, 5}, "is f32 [3, 5] in %s, and would be f32 [3, 4]"}};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char like[600], from[600], to[600], want[1500];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int64_t *shape = rows[i].shape;
        fsdp_safetensors_entry e[2] = {
            tensor(rows[i].name, rows[i].dtype, rows[i].ndim, shape[0], shape[1], shape[2]),
            foreign("b", "U16", 1, 2, 0)};
        fsdp_safetensors_entry f[2] = {tensor("a", FSDP_F32, 2, 3, 4, 0), e[1]};
        store_tensors(h_tmpdir(), "like.safetensors", e, 2);
        store_tensors(h_tmpdir(), "from.safetensors", f, 2);
        d.like = path_of(like, "like.safetensors");
        d.may_lack = may_lack_buffers;
        path_of(from, "from.safetensors");
        fsdp_status status = fsdp_checkpoint_export(from, path_of(to, i == 4 ? "bf16" : "to"), &d,
                                                    SAID);
        CHECK_STATUS(status, i == 0 || i == 4 ? FSDP_OK : FSDP_ERR_INVALID_ARG);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(want, sizeof want, rows[i].says, like);
#pragma GCC diagnostic pop
        says(want);
        if (!*want) CHECK_EQ_STR(said, "");
        CHECK_EQ_INT(h_entries(h_tmpdir()), 2 + 2 + 1 + (i >= 4));
    }
    fsdp_safetensors_entry u[2] = {foreign("a", "U32", 1, 2, 0), foreign("b", "U16", 1, 2, 0)};
    fsdp_safetensors_entry v[2] = {tensor("a", FSDP_I32, 1, 2, 0, 0),
                                   foreign("b", "F8_E5M2", 1, 2, 0)};
    store_tensors(h_tmpdir(), "like.safetensors", u, 2);
    store_tensors(h_tmpdir(), "from.safetensors", v, 2);
    CHECK_OK(fsdp_checkpoint_export(from, path_of(to, "other"), &d, SAID));
    says("'a', 'b': choose dtype"); /* dtypes that the library does not have are told apart */
}

/* Gives the last `count` bytes of a file the values of those before them; differs: but for one. */
static void repeat_bytes(const char *path, size_t count, int differs) {
    blob b = load(path, "");
    char *last = b.at + b.size - count;
    memcpy(last, last - count, count);
    last[count - 1] ^= (char)differs;
    store(path, "", b.at, b.size);
    free(b.at);
}

/* A matrix that one side lacks: tied if it has the bytes of an embedding. `where` writes both. */
TEST(fsdpck, export_like_tied) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char like[600], from[600], to[600];
    path_of(like, "like.safetensors"), path_of(from, "from.safetensors");
    d.like = like;
    for (int there = 0; there < 2; there++)
        for (int equal = 0; equal < 2; equal++)
            for (int name = 0; name < 3; name++)
                for (int dim = 0; dim < 2; dim++) {
                    static const char *const names[] = {"model.embed_tokens.weight",
                                                        "transformer.wte.weight", "model.mlp.w"};
                    fsdp_safetensors_entry both[2] = {
                        tensor("lm_head.weight", FSDP_F32, 2 - dim, 5 + 10 * dim, 3, 0),
                        tensor(names[name], FSDP_F32, 2 - dim, 5 + 10 * dim, 3, 0)};
                    store_tensors(h_tmpdir(), there ? "like.safetensors" : "from.safetensors", both,
                                  2);
                    repeat_bytes(there ? like : from, 60, !equal);
                    store_tensors(h_tmpdir(), there ? "from.safetensors" : "like.safetensors",
                                  both + 1, 1);
                    snprintf(to, sizeof to, "%s/%d%d%d%d", h_tmpdir(), there, equal, name, dim);
                    fsdp_status status = fsdp_checkpoint_export(from, to, &d, SAID);
                    CHECK_STATUS(status,
                                 equal && name < 2 && !dim ? FSDP_OK : FSDP_ERR_INVALID_ARG);
                    if (status)
                        says(there ? "1 tensors are missing: 'lm_head.weight'"
                                   : "1 are extra: 'lm_head.weight'");
                    if (status) continue;
                    fsdp_checkpoint_tensor t, h;
                    size_t size;
                    fsdp_checkpoint_reader *r = open_it(to), *old = open_it(from);
                    char *e = values_of(r, names[name], &t, &size);
                    char *f = values_of(old, names[name], &t, &size);
                    CHECK_EQ_MEM(e, f, 60);
                    CHECK_STATUS(fsdp_checkpoint_tensor_at(r, 1 + there, &h), FSDP_ERR_INVALID_ARG);
                    if (there) { /* OUT has both, with the weights of `from` */
                        char *head = values_of(r, "lm_head.weight", &h, &size);
                        CHECK_EQ_MEM(head, f, 60);
                        free(head);
                    }
                    free(e), free(f);
                    fsdp_checkpoint_close(r), fsdp_checkpoint_close(old);
                }
}

/* Only the whole of an old tensor, as it is, is a copy of one with its bytes: not its transpose, not
   some of its rows, not it and another one. */
TEST(fsdpck, export_like_changed_is_not_tied) {
    static const struct {
        mapping list[3];
        int num;
        int64_t rows;
    } made[] = {{{{"y", "lm_head.weight", 1, 0, 0}, {"z", "wte.weight", 0, 0, 0}}, 2, 4},
                {{{"y", "lm_head.weight", 0, 0, 2}, {"y", "wte.weight", 0, 0, 2}}, 2, 2},
                {{{"y", "lm_head.weight", 0, 0, 0},
                  {"c", "lm_head.weight", 0, 4, 0},
                  {"z", "wte.weight", 0, 0, 0}},
                 3,
                 4}};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char like[600], from[600], to[600];
    fsdp_safetensors_entry old[3] = {tensor("c", FSDP_F32, 2, 4, 4, 0),
                                     tensor("y", FSDP_F32, 2, 4, 4, 0),
                                     tensor("z", FSDP_F32, 2, 4, 4, 0)};
    store_tensors(h_tmpdir(), "from.safetensors", old, 3);
    repeat_bytes(path_of(from, "from.safetensors"), 64, 0);
    d.like = path_of(like, "like.safetensors");
    d.source = mapped_source;
    for (int i = 0; i < 3; i++) {
        mapped m = {made[i].list, made[i].num, FSDP_DTYPE_KEEP};
        fsdp_safetensors_entry one = tensor("wte.weight", FSDP_F32, 2, made[i].rows, 4, 0);
        store_tensors(h_tmpdir(), "like.safetensors", &one, 1);
        d.user = &m;
        CHECK_STATUS(fsdp_checkpoint_export(from, path_of(to, "to"), &d, SAID),
                     FSDP_ERR_INVALID_ARG);
        says("1 are extra: 'lm_head.weight'");
    }
}

/* Matrices that are compared in several pieces; they differ in none, or in one. */
TEST(fsdpck, export_like_tied_large) {
    enum { ROWS = 1200001, BYTES = 4 * ROWS };
    fsdp_safetensors_entry e[2] = {tensor("wte.weight", FSDP_F32, 2, ROWS, 1, 0),
                                   tensor("lm_head.weight", FSDP_F32, 2, ROWS, 1, 0)};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char like[600], from[600], to[600];
    store_tensors(h_tmpdir(), "like.safetensors", e, 1);
    store_tensors(h_tmpdir(), "from.safetensors", e, 2);
    d.like = path_of(like, "like.safetensors");
    repeat_bytes(path_of(from, "from.safetensors"), BYTES, 0);
    export_to(from, path_of(to, "to"), &d);
    for (int64_t at = 1; at <= BYTES; at += BYTES / 3) {
        blob b = load(from, "");
        b.at[b.size - at] ^= 1;
        store(from, "", b.at, b.size);
        CHECK_STATUS(fsdp_checkpoint_export(from, path_of(to, "no"), &d, SAID),
                     FSDP_ERR_INVALID_ARG);
        says("1 are extra: 'lm_head.weight'");
        b.at[b.size - at] ^= 1;
        store(from, "", b.at, b.size);
        free(b.at);
    }
}

/* A source is asked for parameters only, and may name eight tensors at most. */
static int asked_sources(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    CHECK(strncmp(v->name, "optim.", 6) && strncmp(v->name, "fsdp.", 5));
    snprintf(out->name, sizeof out->name, "new.%s", v->name);
    return *(const int *)user;
}
TEST(fsdpck, export_asks_for_parameters) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    fsdp_checkpoint_tensor t;
    char from[600], to[600];
    int num = 1, states = 0;
    golden_path(from, "example/step-00000017"), path_of(to, "to");
    d.source = asked_sources, d.user = &num, d.with_optimizer = 1;
    export_to(from, to, &d);
    fsdp_checkpoint_reader *r = open_it(to);
    for (int64_t i = 0; !fsdp_checkpoint_tensor_at(r, i, &t); i++) {
        const int state = strncmp(t.name, "new.", 4) != 0;
        CHECK_MSG(!state || !strncmp(t.name, "optim.", 6) || !strncmp(t.name, "fsdp.", 5), "%s",
                  t.name);
        states += state;
    }
    CHECK(states > 0);
    fsdp_checkpoint_close(r);
    for (num = -1; num <= 9; num += 10) {
        CHECK_STATUS(fsdp_checkpoint_export(from, path_of(to, "no"), &d, SAID),
                     FSDP_ERR_INVALID_ARG);
        says(num < 0 ? " apart into -1 tensors" : " apart into 9 tensors");
    }
}

/* States are compared with nothing: the directory of a model has none. */
TEST(fsdpck, export_like_with_states) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], plain[600], all[600], like[600];
    golden_path(from, "example/step-00000017");
    export_to(from, path_of(plain, "plain"), &d);
    d.with_optimizer = 1;
    export_to(from, path_of(all, "all"), &d);
    d.like = plain;
    export_to(from, path_of(like, "like"), &d);
    blob a = load(all, "model.safetensors"), b = load(like, "model.safetensors");
    CHECK_EQ_INT(a.size, b.size);
    CHECK_EQ_MEM(a.at, b.at, (size_t)a.size);
    free(a.at), free(b.at);
}

/* Resharding a checkpoint of this library: all tensors, the step, the ranks whose blobs it has. */
TEST(fsdpck, reshards) {
    static const struct {
        const char *name;
        int ranks, files;
        int64_t step;
    } cuts[] = {{"a", 1, 1, 17},
                {"b/", 2, 2, 17},
                {"step-00000400", 3, 3, 400},
                {"d//", 9, 7, 17},
                {"step-400", 1, 1, 17}};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], to[600], whole[600], again[600], name[80];
    golden_path(from, "example/step-00000017");
    d.with_optimizer = 1;
    export_to(from, path_of(whole, "whole"), &d);
    for (int i = 0; i < 5; i++) {
        fsdp_checkpoint_contents c;
        d.num_ranks = cuts[i].ranks, d.with_optimizer = 0;
        export_to(from, path_of(to, cuts[i].name), &d);
        fsdp_checkpoint_reader *r = open_it(to);
        CHECK_OK(fsdp_checkpoint_contents_of(r, &c));
        CHECK(c.step == cuts[i].step && c.world == 2 && c.num_tensors == 7);
        CHECK_EQ_INT(c.num_files, cuts[i].files);
        fsdp_checkpoint_close(r);
        CHECK_OK(fsdp_checkpoint_verify(to, NULL, NULL, SAID));
        blob b = load(to, example_files[1]);
        snprintf(name, sizeof name, "\"1.0\",\"format\":\"pt\",\"fsdp.writer\":\"1/%d\"}",
                 cuts[i].ranks);
        CHECK_MSG(strstr(b.at + 8, name) != NULL, "%s is not in %s", name, b.at + 8);
        free(b.at);
        d.num_ranks = 0, d.with_optimizer = 1;
        snprintf(name, sizeof name, "again%d", i);
        export_to(to, path_of(again, name), &d);
        same_file(again, "model.safetensors", whole, "model.safetensors");
    }
    CHECK_EQ_INT(h_entries(h_tmpdir()), 2 + 1 + 10); /* nothing temporary is left */
}

TEST(fsdpck, index_is_ascii) {
    fsdp_safetensors_entry e[2] = {
        tensor("q\"\\\n\x7f", FSDP_U8, 1, 1, 0, 0),
        tensor("\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", FSDP_U8, 1, 1, 0, 0)};
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], to[600];
    store_tensors(h_tmpdir(), "from.safetensors", e, 2);
    d.max_file_bytes = 1;
    export_to(path_of(from, "from.safetensors"), path_of(to, "to"), &d);
    blob b = load(to, "model.safetensors.index.json");
    CHECK_MSG(strstr(b.at, "    \"q\\\"\\\\\\n\\u007f\": \"model-00001-of-00002.safetensors\",\n"
                           "    \"\\u00e4\\u20ac\\ud83d\\ude00\": \"model-00002-of-00002"),
              "%s", b.at);
    free(b.at);
    fsdp_checkpoint_close(open_it(to));
}

TEST(fsdpck, export_refuses) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], to[600], file[600], deep[600];
    golden_path(from, "checkpoints/torch_fsdp_w3");
    path_of(to, "to");
    store(path_of(file, "file"), "", "x", 1);
#define REFUSES(status, text)                                                                      \
    do {                                                                                           \
        CHECK_STATUS(fsdp_checkpoint_export(from, to, &d, SAID), status);                          \
        says(text);                                                                                \
        CHECK_EQ_INT(h_entries(h_tmpdir()), 3);                                                    \
        memset(&d, 0, sizeof d);                                                                   \
    } while (0)
    d.rename = one_name, d.user = (void *)(uintptr_t) "same";
    REFUSES(FSDP_ERR_INVALID_ARG, "[E465] checkpoint_export: two tensors become 'same'");
    d.rename = prefix_names, d.user = (void *)(uintptr_t) "\xff";
    REFUSES(FSDP_ERR_INVALID_ARG, "[E466] checkpoint_export: the header of 14 tensors");
    d.rename = keep_names, d.user = (void *)(uintptr_t) "";
    REFUSES(FSDP_ERR_INVALID_ARG, "[E467] checkpoint_export: of 36 tensors in");
    d.num_ranks = -1;
    REFUSES(FSDP_ERR_INVALID_ARG, "[E463] checkpoint_export: num_ranks: expected 0 to 1000000");
    d.num_ranks = 1000001;
    REFUSES(FSDP_ERR_INVALID_ARG, "[E463] checkpoint_export: num_ranks: expected 0 to 1000000");
    d.max_file_bytes = -1;
    REFUSES(FSDP_ERR_INVALID_ARG, "[E463] checkpoint_export: max_file_bytes: expected 0 or more");
    d.dtype = FSDP_I32;
    REFUSES(FSDP_ERR_INVALID_ARG, "[E463] checkpoint_export: dtype: expected KEEP or a floating");
    const fsdp_file_ops none = FSDP_ZERO;
    d.files = &none;
    REFUSES(FSDP_ERR_INVALID_ARG, "[E463] checkpoint_export: files: expected NULL or operations");
    d.end_canary = 1;
    REFUSES(FSDP_ERR_INVALID_ARG, "fsdp_checkpoint_export_desc");
    snprintf(to, sizeof to, "%s", file);
    REFUSES(FSDP_ERR_INVALID_ARG, "file is there already");
    snprintf(to, sizeof to, "%s/", h_tmpdir());
    REFUSES(FSDP_ERR_INVALID_ARG, "is there already");
    snprintf(to, sizeof to, "%s", path_of(deep, "no/such/to"));
    REFUSES(FSDP_ERR_IO, "mkdir of ");
    to[0] = 0;
    REFUSES(FSDP_ERR_INVALID_ARG, "[E460] checkpoint_export: out is NULL");
    from[0] = 0, path_of(to, "to");
    REFUSES(FSDP_ERR_INVALID_ARG, "[E460] checkpoint_export: path is NULL");
}

/* Paths with one component, paths of the root's children, relative paths. */
TEST(fsdpck, export_outside_of_the_working_directory) {
    char from[1300], cwd[600];
    CHECK(getcwd(cwd, sizeof cwd) != NULL);
    char golden_at[600];
    golden_path(golden_at, "example/step-00000017");
    snprintf(from, sizeof from, "%s%s%s", *golden_at == '/' ? "" : cwd,
             *golden_at == '/' ? "" : "/", golden_at);
    CHECK_EQ_INT(chdir(h_tmpdir()), 0);
    export_to(from, "out", NULL);
    export_to(from, "./out2/", NULL);
    same_file("out", "model.safetensors", "out2", "model.safetensors");
    CHECK_EQ_INT(h_entries("."), 4);
}

/* ---- damage ---------------------------------------------------------------------------------- */

static void copy_example(const char *dir) {
    char from[600];
    golden_path(from, "example/step-00000017");
    CHECK_EQ_INT(mkdir(dir, 0777), 0);
    for (int i = 0; i < 3; i++) {
        blob b = load(from, example_files[i]);
        store(dir, example_files[i], b.at, b.size);
        free(b.at);
    }
}
static void damaged(const char *dir, const char *what) {
    fsdp_status status = fsdp_checkpoint_verify(dir, NULL, NULL, SAID);
    CHECK_MSG(status == FSDP_ERR_CORRUPT, "%s: %d %s", what, (int)status, said);
    says("[E43"); /* an id of open.h, with the call and a file */
    says("checkpoint_verify: ");
    CHECK_MSG(strstr(said, ".safetensors") || strstr(said, "manifest.json"), "%s: %s", what, said);
}

TEST(fsdpck, verify_finds_each_bit) {
    char dir[600], what[200];
    copy_example(path_of(dir, "step-00000017"));
    CHECK_OK(fsdp_checkpoint_verify(dir, NULL, NULL, SAID));
    CHECK_EQ_STR(said, "step 17: 7 tensors in 2 files, 2 checksums of 89 bytes");
    for (int i = 0; i < 3; i++) {
        blob b = load(dir, example_files[i]);
        char path[800];
        snprintf(path, sizeof path, "%s/%s", dir, example_files[i]);
        int fd = open(path, O_RDWR);
        CHECK(fd >= 0);
        for (int64_t k = 0; k < b.size; k++) {
            char flipped = (char)(b.at[k] ^ (char)(1 << (golden_splitmix64((uint64_t)k) & 7)));
            CHECK_EQ_INT(pwrite(fd, &flipped, 1, k), 1);
            snprintf(what, sizeof what, "byte %d of %s", (int)k, example_files[i]);
            damaged(dir, what);
            CHECK_EQ_INT(pwrite(fd, &b.at[k], 1, k), 1);
        }
        for (int64_t size = b.size - 1; size >= 0; size--) {
            CHECK_EQ_INT(ftruncate(fd, size), 0);
            snprintf(what, sizeof what, "%d bytes of %s", (int)size, example_files[i]);
            damaged(dir, what);
        }
        CHECK_EQ_INT(pwrite(fd, b.at, (size_t)b.size, 0), b.size);
        close(fd);
        free(b.at);
    }
    CHECK_OK(fsdp_checkpoint_verify(dir, NULL, NULL, SAID));
}

TEST(fsdpck, verify_finds_other_files) {
    char dir[600], path[800], other[600], from[600];
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    copy_example(path_of(dir, "step-00000017"));
    for (int i = 1; i < 3; i++) {
        blob b = load(dir, example_files[i]), c = load(dir, example_files[3 - i]);
        store(dir, example_files[i], c.at, c.size); /* the other rank's */
        damaged(dir, "swapped");
        snprintf(path, sizeof path, "%s/%s", dir, example_files[i]);
        CHECK_EQ_INT(unlink(path), 0);
        damaged(dir, "removed");
        says("No such file");
        CHECK_EQ_INT(mkfifo(path, 0600), 0); /* no call hangs */
        damaged(dir, "a FIFO");
        CHECK_EQ_INT(unlink(path), 0);
        CHECK_EQ_INT(mkdir(path, 0700), 0);
        damaged(dir, "a directory");
        CHECK_EQ_INT(rmdir(path), 0);
        store(dir, example_files[i], b.at, b.size);
        free(b.at);
        free(c.at);
    }
    CHECK_OK(fsdp_checkpoint_verify(dir, NULL, NULL, SAID));
    d.num_ranks = 2; /* the manifest of another step and number of ranks */
    export_to(golden_path(from, "example/step-00000017"), path_of(other, "step-00000018"), &d);
    blob b = load(other, "manifest.json");
    store(dir, "manifest.json", b.at, b.size);
    free(b.at);
    damaged(dir, "another manifest");
    snprintf(path, sizeof path, "%s/manifest.json", dir);
    CHECK_EQ_INT(unlink(path), 0); /* then it counts as another program's, without checksums */
    CHECK_OK(fsdp_checkpoint_verify(dir, NULL, NULL, SAID));
    CHECK_EQ_STR(
        said, "7 tensors in 2 files, 89 bytes that have no checksums: only headers were checked");
    snprintf(path, sizeof path, "%s/%s", dir, example_files[1]);
    CHECK_EQ_INT(unlink(path), 0);
    CHECK_STATUS(fsdp_checkpoint_verify(dir, NULL, NULL, SAID), FSDP_ERR_CORRUPT);
    says("so some rows are in no file");
}

/* A valid manifest with another number of checksums than the file has blocks. */
TEST(fsdpck, checksums_for_other_blocks) {
    char dir[600], text[2000], *at;
    copy_example(path_of(dir, "step-00000017"));
    blob b = load(dir, "manifest.json");
    CHECK((at = strstr(b.at, "\"crc\":\"")) != NULL && b.size < 1500);
    at += 7; /* the only checksum of the first file: none, two, and the original */
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "%.*s%.*s%.*s%s", (int)(at - b.at), b.at, i ? 8 : 0, at,
                 i == 1 ? 8 : 0, at, at + 8);
        int64_t n = (int64_t)strlen(text) - 23;
        snprintf(text + n, 24, ",\n\"crc32c\":\"%08x\"}\n", (unsigned)fsdp_crc32c(0, text, n));
        store(dir, "manifest.json", text, (int64_t)strlen(text));
        CHECK_STATUS(fsdp_checkpoint_verify(dir, NULL, NULL, SAID),
                     i < 2 ? FSDP_ERR_CORRUPT : FSDP_OK);
        if (i < 2) says("expected sizes that agree with the number of checksums");
    }
    free(b.at);
}

TEST(fsdpck, manifest_that_is_no_file) {
    static const char *const texts[4] = {"manifest.json: it is no regular file",
                                         "manifest.json: it is no regular file",
                                         "there is a manifest.json that cannot be opened",
                                         "manifest.json: Too many levels of symbolic links"};
    char dir[600], path[700];
    copy_example(path_of(dir, "step-00000017"));
    snprintf(path, sizeof path, "%s/manifest.json", dir);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ_INT(remove(path), 0);
        CHECK(!(i == 0   ? mkfifo(path, 0600)
                : i == 1 ? mkdir(path, 0700)
                : i == 2 ? symlink("nowhere", path)
                         : symlink("manifest.json", path)));
        damaged(dir, texts[i]);
        says(texts[i]);
    }
    CHECK_EQ_INT(remove(path), 0);
    CHECK_OK(fsdp_checkpoint_verify(dir, NULL, NULL, SAID));
    says("only headers were checked");
}

TEST(fsdpck, damage_is_not_passed_on) {
    char dir[600], out[600];
    float w[6];
    copy_example(path_of(dir, "step-00000017"));
    fsdp_checkpoint_reader *r = open_it(dir);
    blob b = load(dir, example_files[1]);
    b.at[b.size - 1] ^= 1;
    store(dir, example_files[1], b.at, b.size);
    free(b.at);
    CHECK_STATUS(fsdp_checkpoint_read(r, 3, NULL, NULL, FSDP_F32, w, SAID), FSDP_ERR_CORRUPT);
    says("block 0 (bytes 0..");
    says("the file was changed, or the disk fails");
    fsdp_checkpoint_close(r);
    CHECK_STATUS(fsdp_checkpoint_export(dir, path_of(out, "out"), NULL, SAID), FSDP_ERR_CORRUPT);
    says("[E434] checkpoint_export: ");
    CHECK_EQ_INT(h_entries(h_tmpdir()), 3);
}

/* ---- file calls that fail -------------------------------------------------------------------- */

typedef struct faulty { /* call number `at` fails or is short */
    int calls, at, short_calls;
    int error; /* 0: none */
} faulty;

static int fails(void *user) {
    faulty *f = (faulty *)user;
    return f->calls++ == f->at ? f->error : 0;
}
static int my_open(void *user, const char *path, int create, void **file, int64_t *nbytes) {
    struct stat st;
    int error = fails(user);
    if (error) return error;
    int fd = open(path, create ? O_WRONLY | O_CREAT | O_EXCL : O_RDONLY, 0666);
    if (fd < 0) return errno;
    CHECK_EQ_INT(fstat(fd, &st), 0);
    *nbytes = st.st_size;
    *file = (void *)(intptr_t)(fd + 1);
    if (S_ISREG(st.st_mode)) return 0;
    close(fd);
    return EISDIR;
}
static int my_read(void *user, void *file, void *data, int64_t nbytes, int64_t at, int64_t *done) {
    int error = fails(user);
    if (error) return error;
    if (((faulty *)user)->short_calls) nbytes = (nbytes + 1) / 2;
    *done = pread((int)(intptr_t)file - 1, data, (size_t)nbytes, at);
    return *done < 0 ? errno : 0;
}
static int my_write(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                    int64_t *done) {
    int error = fails(user);
    if (error) return error;
    if (((faulty *)user)->short_calls) nbytes = (nbytes + 1) / 2;
    *done = pwrite((int)(intptr_t)file - 1, data, (size_t)nbytes, at);
    return *done < 0 ? errno : 0;
}
static int my_sync(void *user, void *file) {
    (void)file;
    return fails(user);
}
static int my_close(void *user, void *file) {
    int error = fails(user);
    return close((int)(intptr_t)file - 1) ? errno : error;
}
static int my_make_dir(void *user, const char *path) {
    int error = fails(user);
    return error ? error : mkdir(path, 0777) ? errno : 0;
}
static int my_sync_dir(void *user, const char *path) {
    (void)path;
    return fails(user);
}
static int my_rename(void *user, const char *from, const char *to) {
    int error = fails(user);
    return error ? error : rename(from, to) ? errno : 0;
}
static int my_remove(void *user, const char *path, int is_dir) {
    (void)user;
    return (is_dir ? rmdir(path) : unlink(path)) ? errno : 0;
}
static int my_list(void *user, const char *path, int (*each)(void *arg, const char *name),
                   void *arg) {
    const struct dirent *entry;
    int error = fails(user), stop = 0;
    if (error) return error;
    DIR *dir = opendir(path);
    if (!dir) return errno;
    while (!stop && (entry = readdir(dir)) != NULL)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            stop = each(arg, entry->d_name);
    closedir(dir);
    return 0;
}
static const fsdp_file_ops my_files = {
    1,        sizeof(fsdp_file_ops), my_open,     my_read,   my_write,  my_sync,
    my_close, my_make_dir,           my_sync_dir, my_rename, my_remove, my_list};

static const struct {
    const char *name, *from;
    int ranks;
    int64_t limit;
    const char *like;
} exports[] = {{"one_file", "example/step-00000017", 0, 0, NULL},
               {"index", "checkpoints/torch_consolidated", 0, 3000, NULL},
               {"ours", "checkpoints/torch_fsdp_w3", 2, 0, NULL},
               {"like", "checkpoints/transformers_gpt2", 0, 0, "checkpoints/transformers_gpt2"}};
/* Each call fails in turn: the output is complete or does not exist, and nothing else is left. */
TEST_P(fsdpck, file_calls_fail, exports) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], out[600], like[600];
    faulty f = {0, -1, 0, EIO};
    int done = 0;
    if (row->like) d.like = golden_path(like, row->like);
    golden_path(from, row->from);
    path_of(out, "out");
    d.num_ranks = row->ranks, d.max_file_bytes = row->limit;
    d.files = &my_files, d.files_user = &f;
    for (f.at = 0; !done; f.at++) {
        f.calls = 0;
        fsdp_status status = fsdp_checkpoint_export(from, out, &d, SAID);
        done = f.calls <= f.at;
        CHECK_MSG(status == (done ? FSDP_OK : FSDP_ERR_IO), "call %d: %s", f.at, said);
        if (!done) says("Input/output error (5)");
        int last = strstr(said, "fsync of the directory") && access(out, F_OK) == 0;
        CHECK_EQ_INT(h_entries(h_tmpdir()), 2 + (done || last));
        if (!last) continue; /* the sync of its parent: the output is complete */
        CHECK_OK(fsdp_checkpoint_verify(out, NULL, NULL, SAID));
        DIR *dir = opendir(out);
        const struct dirent *entry;
        while (dir && (entry = readdir(dir)) != NULL)
            if (entry->d_name[0] != '.') CHECK_EQ_INT(unlinkat(dirfd(dir), entry->d_name, 0), 0);
        closedir(dir);
        CHECK_EQ_INT(rmdir(out), 0);
    }
    CHECK_MSG(f.at > 12, "%d calls", f.at);
    CHECK_OK(fsdp_checkpoint_verify(out, NULL, NULL, SAID));
}

/* While `watched`, allocation number `fail_at` of the process fails, and blocks are counted. */
static int watched, allocations, fail_at, num_live;
static void *live[256];
#if defined(__GLIBC__) && !defined(W_SANITIZED)
#define INTERPOSED 1
extern void *libc_calloc(size_t count, size_t size) __asm__("__libc_calloc");
extern void libc_free(void *ptr) __asm__("__libc_free");
void *calloc(size_t count, size_t size) {
    void *ptr = watched && allocations++ == fail_at ? NULL : libc_calloc(count, size);
    if (!ptr) errno = ENOMEM;
    if (watched && ptr && num_live < (int)(sizeof live / sizeof *live)) live[num_live++] = ptr;
    return ptr;
}
void *malloc(size_t size) { return calloc(size, 1); }
void free(void *ptr) {
    for (int i = 0; watched && i < num_live; i++)
        if (live[i] == ptr) live[i--] = live[--num_live];
    libc_free(ptr);
}
#else
#define INTERPOSED 0
#endif

static int same_names(void *user, const char *name, char *out) {
    (void)user;
    snprintf(out, FSDP_CHECKPOINT_NAME, "%s", name);
    return 1;
}
static void same_files(const char *dir, const char *other) { /* those in subdirectories by number */
    const struct dirent *entry;
    DIR *d = opendir(dir);
    while (d && (entry = readdir(d)) != NULL)
        if (strchr(entry->d_name, '.') > entry->d_name)
            same_file(dir, entry->d_name, other, entry->d_name);
    CHECK(d && num_names(dir) == num_names(other));
    closedir(d);
}
/* Each allocation of an export fails in turn: it fails without a trace and says so, or the libc
   does without. */
TEST(fsdpck, allocations_fail) {
    static const mapping list[] = {{"a", "new", 1, 0, 0}, {"b", "c", 0, 0, 3}, {"b", "d", 0, 0, 0}};
    mapped m = {list, 3, FSDP_DTYPE_KEEP};
    fsdp_safetensors_entry e[2] = {tensor("a", FSDP_F32, 2, 6, 4, 0),
                                   tensor("b", FSDP_BF16, 2, 5, 7, 0)};
    char from[600], like[600], to[600], want[600];
    if (!INTERPOSED) SKIP("a sanitizer has its own malloc, or the libc is not glibc");
    store_tensors(h_tmpdir(), "from.safetensors", e, 2);
    path_of(from, "from.safetensors"), path_of(to, "to");
    fsdp_checkpoint_export_desc plain = FSDP_ZERO,
                                d[4] = {FSDP_ZERO, FSDP_ZERO, FSDP_ZERO, FSDP_ZERO};
    plain.source = mapped_source, plain.user = &m;
    export_to(from, path_of(like, "like"), &plain);
    store_deep(like, "config.json"), store_deep(like, "1_Pooling/config.json");
    d[0] = plain, d[0].like = like;
    d[1].rename = same_names, d[1].like = like, d[1].dtype = FSDP_F32;
    d[2].num_ranks = 2;
    d[3].max_file_bytes = 60;
    for (int k = 0; k < 4; k++) {
        int failed = 0;
        const char *path = k == 1 ? like : from;
        snprintf(to, sizeof to, "%s/want%d", h_tmpdir(), k);
        (void)fsdp_checkpoint_export(path, to, &d[k], SAID);
        memcpy(want, to, sizeof want), path_of(to, "to");
        const int before = h_entries(h_tmpdir());
        for (fail_at = 0; allocations >= fail_at; fail_at++) {
            allocations = num_live = 0, watched = 1;
            const fsdp_status status = fsdp_checkpoint_export(path, to, &d[k], SAID);
            watched = 0;
            CHECK_MSG(num_live == 0 && h_entries(h_tmpdir()) == before + !status,
                      "export %d, allocation %d: %d blocks are left: %s", k, fail_at, num_live,
                      said);
            failed += status != FSDP_OK;
            if (status == FSDP_ERR_OUT_OF_MEMORY) says("[E420] ");
            else if (status) says("Cannot allocate memory");
            if (status) continue;
            same_files(want, to);
            h_remove_tree(to);
        }
        CHECK_MSG(failed >= 15, "export %d: %d allocations failed", k, failed);
    }
}

TEST(fsdpck, short_and_interrupted_calls) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char from[600], out[600], want[600], name[40];
    faulty f = {0, -1, 1, EINTR};
    golden_path(from, "checkpoints/torch_fsdp_w3");
    export_to(from, path_of(want, "want"), NULL);
    d.files = &my_files, d.files_user = &f;
    export_to(from, path_of(out, "short"), &d);
    same_file(out, "model.safetensors", want, "model.safetensors");
    /* opens, reads, writes, syncs; other calls are not repeated */
    for (f.at = 0; f.at < 60; f.at++) {
        snprintf(name, sizeof name, "out%d", f.at);
        f.calls = 0;
        fsdp_status status = fsdp_checkpoint_export(from, path_of(out, name), &d, SAID);
        if (status) says("Interrupted");
        if (status)
            CHECK_MSG(strstr(said, "close") || strstr(said, "list") || strstr(said, "mkdir") ||
                          strstr(said, "rename"),
                      "%s", said);
        else same_file(out, "model.safetensors", want, "model.safetensors");
    }
}

/* ---- the tool -------------------------------------------------------------------------------- */

static const char *tool(void) {
    const char *path = getenv("FSDPCK");
    if (!path || !*path) path = "tools/fsdpck";
    if (access(path, X_OK)) SKIP("no tools/fsdpck here: make tools/fsdpck");
    return path;
}

/* Runs fsdpck with the words up to NULL; stdout and stderr go to `out`, or to a file of the test.
   Returns the exit status; -1: the output is not read. */
static int start(int out, const char *word, va_list more) {
    char path[600];
    char *argv[24];
    int n = 0, status = 0, file = out;
    argv[n++] = (char *)(uintptr_t)tool();
    for (; word && n < 23; word = va_arg(more, const char *)) argv[n++] = (char *)(uintptr_t)word;
    argv[n] = NULL;
    if (out < 0) file = open(path_of(path, "said"), O_CREAT | O_TRUNC | O_RDWR, 0600);
    CHECK(file >= 0);
    fflush(NULL);
    pid_t pid = fork();
    if (!pid) {
        dup2(file, STDERR_FILENO);
        if (out < 0) dup2(file, STDOUT_FILENO);
        execv(argv[0], argv);
        _exit(99);
    }
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK_MSG(WIFEXITED(status), "signal %d", WTERMSIG(status));
    if (out >= 0) return WEXITSTATUS(status);
    ssize_t length = pread(file, said, sizeof said - 1, 0);
    said[length < 0 ? 0 : length] = 0;
    close(file);
    CHECK_EQ_INT(unlink(path), 0);
    return WEXITSTATUS(status);
}
static int run(const char *word, ...) {
    va_list more;
    va_start(more, word);
    int status = start(-1, word, more);
    va_end(more);
    return status;
}
static int run_to(int out, const char *word, ...) {
    va_list more;
    va_start(more, word);
    int status = start(out, word, more);
    va_end(more);
    return status;
}
#define RUN(...) run(__VA_ARGS__, (const char *)NULL)

TEST(fsdpck_tool, help) {
    static const char *const verbs[] = {"ls", "verify", "diff", "reshard", "export", "import"};
    CHECK_EQ_INT(RUN("--help"), 0);
    says("usage: fsdpck VERB");
    says("Exit status: 0 right; 1 damaged, or (diff) different; 2 wrong use");
    for (int i = 0; i < 6; i++) {
        char line[40];
        snprintf(line, sizeof line, "  fsdpck %s ", verbs[i]);
        CHECK_EQ_INT(RUN("-h"), 0);
        says(line);
        CHECK_EQ_INT(RUN(verbs[i], "--help"), 0);
        says(line + 2);
        says("Exit status: 0 right; 1 damaged");
        CHECK_EQ_INT(RUN(verbs[i], "one", "two", "three", "-h"), 0);
    }
    CHECK_EQ_INT(run(NULL), 2);
    says("usage: fsdpck VERB");
}

TEST(fsdpck_tool, wrong_use) {
    CHECK_EQ_INT(RUN("list", "x"), 2);
    CHECK_EQ_STR(said, "fsdpck: [E468] unknown verb 'list'; --help explains\n");
    CHECK_EQ_INT(RUN("ls", "--ranks", "2", "x"), 2);
    CHECK_EQ_STR(said, "fsdpck: [E468] unknown option '--ranks'; --help explains\n");
    CHECK_EQ_INT(RUN("ls"), 2);
    CHECK_EQ_STR(said, "fsdpck: [E469] ls: expected PATH; --help explains\n");
    CHECK_EQ_INT(RUN("ls", "a", "b"), 2);
    CHECK_EQ_INT(RUN("diff", "a"), 2);
    CHECK_EQ_STR(said, "fsdpck: [E469] diff: expected A B; --help explains\n");
    CHECK_EQ_INT(RUN("reshard", "a", "b"), 2);
    CHECK_EQ_STR(said, "fsdpck: [E469] reshard: expected --ranks N; --help explains\n");
    static const char *const bad[] = {"0", "-1", "x", "", "2x", "100000", "99999999999999999999",
                                      " 3"};
    for (int i = 0; i < 8; i++) {
        CHECK_EQ_INT(RUN("import", "a", "b", "--ranks", bad[i]), 2);
        says("[E469] --ranks: expected a number from 1 to 99999; --help explains");
    }
    CHECK_EQ_INT(RUN("import", "a", "b", "--ranks"), 2);
    says("[E469] --ranks");
    CHECK_EQ_INT(RUN("export", "a", "b", "--max-file-bytes=10000000000GB"), 2);
    says("or one with KB, MB or GB");
    CHECK_EQ_INT(RUN("export", "a", "b", "--dtype=i32"), 2);
    CHECK_EQ_STR(said, "fsdpck: [E469] --dtype: expected f32, bf16, f16 or f64; --help explains\n");
    CHECK_EQ_INT(RUN("export", "a", "b", "--dtypes=f32"), 2);
    says("[E468] unknown option '--dtypes=f32'");
}

TEST(fsdpck_tool, ls) {
    char path[600], want[2000];
    golden_path(path, "example/step-00000017");
    CHECK_EQ_INT(RUN("ls", path), 0);
    snprintf(want, sizeof want,
             "%s: step 17 of 2 ranks, 7 tensors, 2 files, 89 bytes\n"
             "           3    1  fsdp.blob.loader  U8 [3]\n"
             "           2    1  fsdp.blob.rng.1  U8 [2]\n"
             "           4    2  h.0.b  BF16 [2]\n"
             "          24    2  h.0.w  F32 [3, 2]\n"
             "          24    2  optim.state.h.0.w.exp_avg  F32 [3, 2]\n"
             "          24    2  optim.state.h.0.w.exp_avg_sq  F32 [3, 2]\n"
             "           8    1  optim.state.h.0.w.step  F64 []\n",
             path);
    CHECK_EQ_STR(said, want);
    CHECK_EQ_INT(RUN("ls", "--", golden_path(path, "checkpoints/torch_ddp_w2")), 0);
    says(": no manifest, 36 tensors, 2 files, 23052 bytes\n");
}

TEST(fsdpck_tool, verify) {
    char dir[600], path[700];
    copy_example(path_of(dir, "step-00000017"));
    CHECK_EQ_INT(RUN("verify", dir), 0);
    says(": step 17: 7 tensors in 2 files, 2 checksums of 89 bytes\n");
    blob b = load(dir, example_files[2]);
    b.at[b.size - 1] ^= 1;
    store(dir, example_files[2], b.at, b.size);
    free(b.at);
    CHECK_EQ_INT(RUN("verify", dir), 1);
    says("fsdpck verify: [E434] checkpoint_verify: ");
    says("block 0 (bytes 0..28 of the data) has CRC ");
    CHECK_EQ_INT(RUN("verify", path_of(path, "nowhere")), 3);
    says("there is no such file or directory");
    CHECK_EQ_INT(mkdir(path, 0700), 0);
    CHECK_EQ_INT(RUN("verify", path), 1);
    says("is it a checkpoint?");
    store(path, ".metadata", "", 0);
    CHECK_EQ_INT(RUN("verify", path), 2);
    says("PyTorch in pickled form");
}

TEST(fsdpck_tool, diff) {
    char a[600], b[600], want[1400];
    copy_example(path_of(a, "a"));
    golden_path(b, "example/step-00000017");
    CHECK_EQ_INT(RUN("diff", a, b), 0);
    CHECK_EQ_STR(said, "7 tensors, all equal\n");
    char cut[600];
    CHECK_EQ_INT(RUN("reshard", a, path_of(cut, "cut"), "--ranks=5"), 0);
    CHECK_EQ_STR(said, "");
    CHECK_EQ_INT(RUN("diff", a, cut), 0);
    fsdp_safetensors_entry e[4] = {
        tensor("only\x1b", FSDP_U8, 1, 1, 0, 0), tensor("w", FSDP_F32, 2, 2, 3, 0),
        tensor("x", FSDP_U8, 1, 3, 0, 0), tensor("y", FSDP_I64, 1, 2, 0, 0)};
    store_tensors(h_tmpdir(), "a.safetensors", e, 4);
    blob file = load(h_tmpdir(), "a.safetensors");
    fsdp_safetensors_entry f[3] = {tensor("w", FSDP_F32, 2, 2, 3, 0),
                                   tensor("x", FSDP_U8, 1, 4, 0, 0),
                                   tensor("y", FSDP_I64, 1, 2, 0, 0)};
    store_tensors(h_tmpdir(), "b.safetensors", f, 3);
    path_of(a, "a.safetensors"), path_of(b, "b.safetensors");
    /* data: y (16 bytes), then w (24): changes w[0][1], and the sign of a zero in w[1][2] */
    fsdp_checkpoint_reader *r = open_it(b);
    fsdp_checkpoint_close(r);
    blob other = load(h_tmpdir(), "b.safetensors");
    char *data = other.at + other.size - (16 + 24 + 4), *mine = file.at + file.size - (16 + 24 + 4);
    float w = 1.5f, v = 3.75f, z = 0, minus = -z;
    memcpy(data + 16, mine + 16, 24);
    memcpy(mine + 20, &w, 4), memcpy(data + 20, &v, 4);
    memcpy(mine + 36, &z, 4), memcpy(data + 36, &minus, 4);
    store(h_tmpdir(), "a.safetensors", file.at, file.size);
    store(h_tmpdir(), "b.safetensors", other.at, other.size);
    free(file.at);
    free(other.at);
    CHECK_EQ_INT(RUN("diff", a, b), 1);
    snprintf(want, sizeof want,
             "only in %s: only\\x1b\n"
             "w: 2 of 6 elements differ, the first at [0, 1]: 1.5 and 3.75; the largest difference "
             "is 2.25\n"
             "x: U8 [3] and U8 [4]\n"
             "3 of 4 tensors differ\n",
             a);
    CHECK_EQ_STR(said, want);
    CHECK_EQ_INT(RUN("diff", a, b, "--skip", "w", "--skip=only*"), 1);
    CHECK_EQ_STR(said, "x: U8 [3] and U8 [4]\n1 of 2 tensors differ\n");
    CHECK_EQ_INT(RUN("diff", b, a), 1);
    CHECK_EQ_INT(RUN("diff", a, "/nowhere"), 3);
}

/* NaN compared with a number is the largest difference; so is a byte of a foreign dtype. */
TEST(fsdpck_tool, diff_of_odd_values) {
    static const float values[2][3] = {{1, 2, 3}, {1, 9, 5}};
    fsdp_safetensors_entry e[2] = {tensor("w", FSDP_F32, 1, 3, 0, 0), foreign("x", "U16", 1, 2, 0)};
    const uint32_t nan = 0x7fc00000u;
    char path[2][600];
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], 600, "%s/%c.safetensors", h_tmpdir(), 'a' + i);
        store_tensors(h_tmpdir(), i ? "b.safetensors" : "a.safetensors", e, 2);
        blob b = load(path[i], "");
        memcpy(b.at + b.size - 16, values[i], 12);
        if (i) memcpy(b.at + b.size - 12, &nan, 4);
        if (i) b.at[b.size - 1] ^= 1;
        store(path[i], "", b.at, b.size);
        free(b.at);
    }
    CHECK_EQ_INT(RUN("diff", path[0], path[0]), 0);
    CHECK_EQ_INT(RUN("diff", path[0], path[1]), 1);
    says("w: 2 of 3 elements differ, the first at [1]: 2 and nan; the largest difference is nan\n"
         "x: 1 of 2 elements differ, the first at [1]\n"
         "2 of 2 tensors differ\n");
}

TEST(fsdpck_tool, export_and_import) {
    char from[600], out[600], cut[600], again[600];
    golden_path(from, "checkpoints/transformers_gpt2");
    CHECK_EQ_INT(RUN("export", from, path_of(out, "out"), "--max-file-bytes", "4KB"), 0);
    CHECK_EQ_STR(said, "");
    CHECK_EQ_INT(h_entries(out), 2 + 3 + 1);
    CHECK_EQ_INT(RUN("diff", from, out), 0);
    CHECK_EQ_INT(RUN("export", from, out), 2);
    says("is there already: choose another name");
    CHECK_EQ_INT(RUN("import", out, path_of(cut, "step-00000007"), "--ranks", "2"), 0);
    CHECK_EQ_INT(RUN("ls", cut), 0);
    says("step-00000007: step 7 of 0 ranks, 28 tensors, 2 files, 7648 bytes\n");
    CHECK_EQ_INT(RUN("verify", cut), 0);
    CHECK_EQ_INT(RUN("diff", from, cut), 0);
    CHECK_EQ_INT(RUN("import", cut, path_of(again, "one")), 0);
    CHECK_EQ_INT(h_entries(again), 2 + 1 + 1);
    CHECK_EQ_INT(RUN("reshard", from, path_of(again, "two"), "--ranks", "2"), 2);
    says("reshard: expected a checkpoint with a manifest; import takes others");
    CHECK_EQ_INT(RUN("export", cut, path_of(again, "bf16"), "--dtype", "bf16"), 0);
    CHECK_EQ_INT(RUN("ls", again), 0);
    says("transformer.wte.weight  BF16 [13, 8]\n");
    golden_path(from, "example/step-00000017");
    CHECK_EQ_INT(RUN("export", from, path_of(again, "params")), 0);
    CHECK_EQ_INT(RUN("diff", from, again), 1);
    says("only in ");
    says("5 of 7 tensors differ\n");
    CHECK_EQ_INT(RUN("export", "--with-optimizer", from, path_of(again, "all")), 0);
    CHECK_EQ_INT(RUN("diff", from, again), 0);
    CHECK_EQ_INT(RUN("export", from, path_of(again, "no/parent")), 3);
    CHECK_EQ_INT(RUN("export", from, path_of(again, "some"), "--skip", "h.0.w"), 0);
    CHECK_EQ_INT(RUN("ls", again), 0);
    CHECK(!strstr(said, "h.0.w") && strstr(said, "h.0.b"));
    CHECK_EQ_INT(RUN("import", from, path_of(again, "less"), "--skip=optim.*"), 0);
    CHECK_EQ_INT(RUN("ls", again), 0);
    CHECK(!strstr(said, "optim.") && strstr(said, "h.0.w"));
    CHECK_EQ_INT(RUN("export", from, path_of(again, "average"), "--ema"), 2);
    says("has no average of a tensor that is to be written (state 'ema')");
    CHECK_EQ_INT(RUN("export", from, path_of(again, "average"), "--ema=slow"), 2);
    says("(state 'ema.slow')");
    CHECK_EQ_INT(RUN("export", from, path_of(again, "x"), "--skip="), 2);
    says("--skip: expected a name with at most one *, at most 64 times");
}

/* The tool's options: GPT-2 of transformers, transposed, cut into parts that are called otherwise, and
   back into its layout. */
TEST(fsdpck_tool, export_like) {
    char gpt2[600], turned[600], cut[600], back[600], want[1400];
    golden_path(gpt2, "checkpoints/transformers_gpt2");
    CHECK_EQ_INT(RUN("export", gpt2, path_of(turned, "turned"), "--transpose", "*.c_attn.weight",
                     "--rename", "transformer.*=*", "--file", "gpt.safetensors"),
                 0);
    CHECK_EQ_INT(RUN("ls", turned), 0);
    says("  h.0.attn.c_attn.weight  F32 [24, 8]\n");
    CHECK_EQ_INT(h_entries(turned), 2 + 1);
    snprintf(want, sizeof want, "%s/gpt.safetensors", turned);
    CHECK_EQ_INT(access(want, F_OK), 0);
    CHECK_EQ_INT(RUN("export", turned, path_of(cut, "cut"), "--rename",
                     "h.*.attn.c_attn.weight=h.*.q,h.*.k,h.*.v",
                     "--rename=h.*.attn.c_attn.bias=h.*.qb,h.*.kb,h.*.vb"),
                 0);
    CHECK_EQ_INT(RUN("ls", cut), 0);
    says("  h.1.k  F32 [8, 8]\n");
    says("  h.1.vb  F32 [8]\n");
    CHECK_EQ_INT(RUN("export", cut, path_of(back, "back"), "--like", gpt2), 2);
    says("[E490] checkpoint_export: compared with ");
    CHECK_EQ_INT(access(back, F_OK), -1);
    CHECK_EQ_INT(RUN("export", cut, back, "--like", gpt2, "--rename",
                     "h.*.q,h.*.k,h.*.v=h.*.attn.c_attn.weight", "--rename",
                     "h.*.qb,h.*.kb,h.*.vb=h.*.attn.c_attn.bias", "--prefix=transformer."),
                 2);
    says("[E491] checkpoint_export: 'transformer.h.0.attn.c_attn.weight' is f32 [8, 24] in ");
    CHECK_EQ_INT(RUN("export", cut, back, "--like", gpt2, "--rename",
                     "h.*.q,h.*.k,h.*.v=h.*.attn.c_attn.weight", "--rename",
                     "h.*.qb,h.*.kb,h.*.vb=h.*.attn.c_attn.bias", "--prefix=transformer.",
                     "--transpose=*attn.c_attn.weight", "--dtype=f32"),
                 0);
    CHECK_EQ_STR(said, "");
    CHECK_EQ_INT(RUN("diff", gpt2, back), 0);
    same_file(gpt2, "config.json", back, "config.json");
    same_file(gpt2, "generation_config.json", back, "generation_config.json");
    CHECK_EQ_INT(h_entries(back), 2 + 3);
    CHECK_EQ_INT(RUN("export", back, path_of(cut, "bf16"), "--like", gpt2, "--dtype=bf16"), 0);
    says("fsdpck: [E493] checkpoint_export: tensors with another dtype than in ");
    CHECK_EQ_INT(RUN("export", back, path_of(cut, "less"), "--skip=*.ln_f.weight", "--skip",
                     "transformer.ln_f.bias*", "--like", gpt2),
                 0);
    CHECK_EQ_INT(RUN("ls", cut), 0); /* --skip counts on both sides */
    CHECK(!strstr(said, "ln_f") && strstr(said, "ln_1"));
    /* with --like a tensor is cut as there: 2 of 3 rows of "h" are those of "a" */
    fsdp_safetensors_entry e[2] = {tensor("a", FSDP_F32, 1, 2, 0, 0),
                                   tensor("b", FSDP_F32, 1, 1, 0, 0)};
    fsdp_safetensors_entry h[1] = {tensor("h", FSDP_F32, 1, 3, 0, 0)};
    store_tensors(h_tmpdir(), "a.safetensors", e, 2);
    store_tensors(h_tmpdir(), "h.safetensors", h, 1);
    path_of(turned, "a.safetensors"), path_of(back, "h.safetensors");
    CHECK_EQ_INT(RUN("export", back, path_of(cut, "ab"), "--rename=h=a,b", "--like", turned), 0);
    CHECK_EQ_INT(RUN("diff", cut, turned), 0); /* the formula gives equal values */
    CHECK_EQ_INT(RUN("export", back, path_of(cut, "no"), "--rename=h=a,b"), 2);
    says("[E484] checkpoint_export: source takes 'h' apart into 2 tensors, whose rows are not its "
         "3");
}

TEST(fsdpck_tool, export_options) {
    static const char *const rules[] = {"x",      "=x",   "x=",   "a,b=c,d", "a**=b", "a=b*",
                                        "a*,b=c", "a,=b", "a=b,", "a=*b*",   ",=a",   "*a,*b=**"};
    char gpt2[600], long_name[600], out[600];
    golden_path(gpt2, "checkpoints/transformers_gpt2");
    path_of(out, "out");
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        CHECK_EQ_INT(RUN("export", gpt2, out, "--rename", rules[i]), 2);
        says("[E469] --rename: expected FROM=TO, with a list of names A,B on at most one side");
    }
    memset(long_name, 'x', 520);
    long_name[520] = 0;
    CHECK_EQ_INT(RUN("export", gpt2, out, "--prefix", long_name), 2);
    says("[E498] 'transformer.h.0.attn.c_attn.bias' gets more than 8 names, or one of more than "
         "511");
    memcpy(long_name, "*=", 2);
    CHECK_EQ_INT(RUN("export", gpt2, out, "--rename", long_name), 2);
    says("[E498] 'transformer.h.0.attn.c_attn.bias' gets more than 8 names");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--rename", "*ln_f.bias=a,b,c,d,e,f,g,h,i"), 2);
    says("'transformer.ln_f.bias' gets more than 8 names");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--rename", "transformer.ln_f.bias,nothing=x"), 2);
    says("[E496] --rename transformer.ln_f.bias,nothing=x: 'transformer.ln_f.bias' fits, and "
         "'nothing' is not there");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--rename", "h.*=x.*"), 2);
    says("[E499] --rename h.*=x.*: no tensor of ");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--transpose", "ln*"), 2);
    says("[E499] --transpose ln*: no tensor of ");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--transpose=*.bias"), 2);
    says("[E486] checkpoint_export: ");
    says(", transposed, expected row 0 next");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--with-optimizer", "--prefix=a."), 2);
    says("[E469] --with-optimizer: expected no --rename, --prefix or --transpose");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--like="), 2);
    says("[E469] --like: expected a directory");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--transpose", "*.c_attn.*"), 2);
    says("[E469] --transpose: expected a name with at most one *, at most 64 times");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--prefix="), 2);
    says("[E469] --prefix: expected a text");
    CHECK_EQ_INT(RUN("export", gpt2, out, "--file=x.bin"), 2);
    says("[E463] checkpoint_export: ");
    CHECK_EQ_INT(RUN("import", gpt2, out, "--like", gpt2), 2);
    says("[E468] unknown option '--like'");
    CHECK_EQ_INT(access(out, F_OK), -1);
    /* the first rule counts; a name with two fitting places; states keep their names */
    CHECK_EQ_INT(RUN("export", gpt2, out, "--rename", "*h.1.ln_1.bias=first", "--rename",
                     "*.ln_1.bias=second"),
                 0);
    CHECK_EQ_INT(RUN("ls", out), 0);
    says("  first  F32 [8]\n");
    says("  second  F32 [8]\n");
}

/* No byte of a name that moves a cursor reaches the terminal, also in error texts. */
TEST(fsdpck_tool, hostile_names) {
    fsdp_safetensors_entry e[2] = {tensor("\x1b[2J\r\nh.0.w \\", FSDP_U8, 1, 2, 0, 0),
                                   tensor("\xe2\x80\xae"
                                          "evil",
                                          FSDP_U8, 1, 2, 0, 0)};
    char path[600], out[600];
    store_tensors(h_tmpdir(), "x.safetensors", e, 2);
    path_of(path, "x.safetensors");
    CHECK_EQ_INT(RUN("ls", path), 0);
    says("  \\x1b[2J\\x0d\\x0ah.0.w \\\\  U8 [2]\n");
    says("  \\xe2\\x80\\xaeevil  U8 [2]\n");
    blob b = load(path, "");
    b.at[strcspn(b.at + 8, "U") + 8] = 'V'; /* an invalid dtype in that tensor */
    store(h_tmpdir(), "x.safetensors", b.at, b.size);
    free(b.at);
    static const char *const verbs[] = {"ls", "verify"};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_INT(RUN(verbs[i], path), 1);
        for (const char *c = said; *c; c++) CHECK(*c == '\n' || (*c >= 0x20 && *c < 0x7f));
        CHECK(strchr(said, '\n') == said + strlen(said) - 1); /* one line */
    }
    CHECK_EQ_INT(RUN("ls", "\x1b[2J"), 3);
    CHECK(!strchr(said, '\x1b'));
    CHECK_EQ_INT(RUN("\x1b[2J"), 2);
    CHECK(!strchr(said, '\x1b'));
    CHECK_EQ_INT(RUN("export", path, path_of(out, "out")), 1);
}

TEST(fsdpck_tool, full_disk_for_the_output) {
    char path[600];
    int full = open("/dev/full", O_WRONLY), null = open("/dev/null", O_WRONLY);
    if (full < 0) SKIP("no /dev/full");
    int before = dup(STDOUT_FILENO);
    fflush(NULL);
    dup2(full, STDOUT_FILENO);
    int status = run_to(null, "ls", golden_path(path, "example/step-00000017"), NULL);
    dup2(before, STDOUT_FILENO);
    CHECK_EQ_INT(status, 3);
}

/* A file larger than `ulimit -f` fails like a full disk. */
TEST(fsdpck_tool, file_limit) {
    fsdp_safetensors_entry e[1] = {tensor("x", FSDP_U8, 1, 1 << 20, 0, 0)};
    struct rlimit before, limit;
    char from[600], out[600], in[600];
    CHECK_EQ_INT(mkdir(path_of(in, "in"), 0700), 0);
    store_tensors(in, "from.safetensors", e, 1);
    path_of(from, "in/from.safetensors");
    CHECK(!getrlimit(RLIMIT_FSIZE, &before));
    limit = before;
    limit.rlim_cur = 1 << 19;
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
    int status = RUN("import", from, path_of(out, "in/out"));
    CHECK(!setrlimit(RLIMIT_FSIZE, &before));
    CHECK_EQ_INT(status, 3);
    says(strerror(EFBIG));
    CHECK_EQ_INT(unlink(from), 0);
    CHECK_EQ_INT(rmdir(in), 0); /* nothing else is left */
}

/* A progress bar appears on terminals only, and is erased when the verb ends. */
TEST(fsdpck_tool, bar) {
    fsdp_safetensors_entry e[1] = {tensor("x", FSDP_U8, 1, 30000000, 0, 0)};
    char from[600], out[600], seen[4000];
    store_tensors(h_tmpdir(), "from.safetensors", e, 1);
    path_of(from, "from.safetensors");
    CHECK_EQ_INT(RUN("import", from, path_of(out, "out")), 0);
    CHECK_EQ_STR(said, "");
    int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0 || grantpt(terminal) || unlockpt(terminal)) SKIP("no terminals here");
    int other = open(ptsname(terminal), O_RDWR | O_NOCTTY);
    CHECK(other >= 0);
    CHECK_EQ_INT(run_to(other, "import", out, path_of(from, "again"), NULL), 0);
    close(other); /* its output remains readable, in pieces, before the end */
    size_t n = 0;
    for (ssize_t got; (got = read(terminal, seen + n, sizeof seen - 1 - n)) > 0;) n += (size_t)got;
    CHECK(n > 4);
    seen[n] = 0;
    CHECK_MSG(strstr(seen, "\r[") && strstr(seen, " %"), "%s", seen);
    CHECK_EQ_STR(seen + n - 4, "\r\033[K");
    close(terminal);
}
