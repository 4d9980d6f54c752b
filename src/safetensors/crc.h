/* safetensors/crc.h - CRC-32C, by a table or by the instruction of the processor

   Callers: programs and read.h (fsdpi_st_little_endian).
   Source: RFC 3720, appendix B.4; slicing by 8 as Intel's note of 2006 describes it.

   A part of fsdp_safetensors.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_SAFETENSORS_H
#include "../../fsdp_safetensors.h"
#endif
#ifndef FSDPI_SAFETENSORS_CRC_H
#define FSDPI_SAFETENSORS_CRC_H

#include <string.h>

// Entry i of a table is the XOR of the entries of its bits: 8 numbers define a table.
#define FSDPI_CRC_1(i, a, b, c, d, e, f, g, h)                                                     \
    ((i)&1 ? a : 0u) ^ ((i)&2 ? b : 0u) ^ ((i)&4 ? c : 0u) ^ ((i)&8 ? d : 0u) ^                    \
        ((i)&16 ? e : 0u) ^ ((i)&32 ? f : 0u) ^ ((i)&64 ? g : 0u) ^ ((i)&128 ? h : 0u)
#define FSDPI_CRC_4(i, ...)                                                                        \
    FSDPI_CRC_1(i, __VA_ARGS__), FSDPI_CRC_1((i) + 1, __VA_ARGS__),                                \
        FSDPI_CRC_1((i) + 2, __VA_ARGS__), FSDPI_CRC_1((i) + 3, __VA_ARGS__)
#define FSDPI_CRC_16(i, ...)                                                                       \
    FSDPI_CRC_4(i, __VA_ARGS__), FSDPI_CRC_4((i) + 4, __VA_ARGS__),                                \
        FSDPI_CRC_4((i) + 8, __VA_ARGS__), FSDPI_CRC_4((i) + 12, __VA_ARGS__)
#define FSDPI_CRC_64(i, ...)                                                                       \
    FSDPI_CRC_16(i, __VA_ARGS__), FSDPI_CRC_16((i) + 16, __VA_ARGS__),                             \
        FSDPI_CRC_16((i) + 32, __VA_ARGS__), FSDPI_CRC_16((i) + 48, __VA_ARGS__)
#define FSDPI_CRC_256(...)                                                                         \
    {                                                                                              \
        FSDPI_CRC_64(0, __VA_ARGS__), FSDPI_CRC_64(64, __VA_ARGS__),                               \
            FSDPI_CRC_64(128, __VA_ARGS__), FSDPI_CRC_64(192, __VA_ARGS__)                         \
    }

// [k][i]: CRC of byte i followed by k zero bytes, without the inversions.
static const uint32_t fsdpi_crc_tables[8][256] = {
    FSDPI_CRC_256(0xF26B8303u, 0xE13B70F7u, 0xC79A971Fu, 0x8AD958CFu, 0x105EC76Fu, 0x20BD8EDEu,
                  0x417B1DBCu, 0x82F63B78u),
    FSDPI_CRC_256(0x13A29877u, 0x274530EEu, 0x4E8A61DCu, 0x9D14C3B8u, 0x3FC5F181u, 0x7F8BE302u,
                  0xFF17C604u, 0xFBC3FAF9u),
    FSDPI_CRC_256(0xA541927Eu, 0x4F6F520Du, 0x9EDEA41Au, 0x38513EC5u, 0x70A27D8Au, 0xE144FB14u,
                  0xC76580D9u, 0x8B277743u),
    FSDPI_CRC_256(0xDD45AAB8u, 0xBF672381u, 0x7B2231F3u, 0xF64463E6u, 0xE964B13Du, 0xD725148Bu,
                  0xABA65FE7u, 0x52A0C93Fu),
    FSDPI_CRC_256(0x38116FACu, 0x7022DF58u, 0xE045BEB0u, 0xC5670B91u, 0x8F2261D3u, 0x1BA8B557u,
                  0x37516AAEu, 0x6EA2D55Cu),
    FSDPI_CRC_256(0xEF306B19u, 0xDB8CA0C3u, 0xB2F53777u, 0x6006181Fu, 0xC00C303Eu, 0x85F4168Du,
                  0x0E045BEBu, 0x1C08B7D6u),
    FSDPI_CRC_256(0x68032CC8u, 0xD0065990u, 0xA5E0C5D1u, 0x4E2DFD53u, 0x9C5BFAA6u, 0x3D5B83BDu,
                  0x7AB7077Au, 0xF56E0EF4u),
    FSDPI_CRC_256(0x493C7D27u, 0x9278FA4Eu, 0x211D826Du, 0x423B04DAu, 0x847609B4u, 0x0D006599u,
                  0x1A00CB32u, 0x34019664u)};

static uint64_t fsdpi_st_little_endian(const unsigned char *p) {
    return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24 |
           (uint64_t)p[4] << 32 | (uint64_t)p[5] << 40 | (uint64_t)p[6] << 48 |
           (uint64_t)p[7] << 56;
}

static uint32_t fsdpi_crc_by_table(uint32_t crc, const unsigned char *p, int64_t n) {
    const uint32_t(*t)[256] = fsdpi_crc_tables;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t x = fsdpi_st_little_endian(p) ^ crc;
        crc = t[7][x & 255] ^ t[6][x >> 8 & 255] ^ t[5][x >> 16 & 255] ^ t[4][x >> 24 & 255] ^
              t[3][x >> 32 & 255] ^ t[2][x >> 40 & 255] ^ t[1][x >> 48 & 255] ^ t[0][x >> 56];
    }
    for (; n > 0; n--) crc = crc >> 8 ^ t[0][(crc ^ *p++) & 255];
    return crc;
}

// nvcc does not accept gcc's names of instructions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
#if defined(__clang__) && __clang_major__ >= 14 // there sse4.2 alone may lack these instructions
#define FSDPI_CRC_TARGET __attribute__((target("crc32")))
#else
#define FSDPI_CRC_TARGET __attribute__((target("sse4.2")))
#endif
FSDPI_CRC_TARGET static inline uint32_t fsdpi_crc_8(uint32_t crc, const unsigned char *p) {
    unsigned long long x;
    memcpy(&x, p, 8);
    return (uint32_t)__builtin_ia32_crc32di(crc, x);
}
FSDPI_CRC_TARGET static inline uint32_t fsdpi_crc_1(uint32_t crc, const unsigned char *p) {
    return __builtin_ia32_crc32qi(crc, *p);
}
static int fsdpi_crc_has_instruction(void) { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && !defined(__CUDACC__)
#define FSDPI_CRC_TARGET
extern unsigned long fsdpi_crc_getauxval(unsigned long type) __asm__("getauxval");
static inline uint32_t fsdpi_crc_8(uint32_t crc, const unsigned char *p) {
    uint64_t x = fsdpi_st_little_endian(p);
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(x));
    return crc;
}
static inline uint32_t fsdpi_crc_1(uint32_t crc, const unsigned char *p) {
    uint32_t x = *p;
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(x));
    return crc;
}
static int fsdpi_crc_has_instruction(void) {
    return fsdpi_crc_getauxval(16 /* AT_HWCAP */) >> 7 & 1; // HWCAP_CRC32
}
#else
#define fsdpi_crc_by_instruction fsdpi_crc_by_table
static int fsdpi_crc_has_instruction(void) { return 0; }
#endif

#ifdef FSDPI_CRC_TARGET
enum { FSDPI_CRC_LANE = 4096 };
// Entry i: CRC of bit i followed by FSDPI_CRC_LANE zero bytes, without the inversions.
static const uint32_t fsdpi_crc_lane[32] = {
    0xC2A5B65Eu, 0x80A71A4Du, 0x04A2426Bu, 0x094484D6u, 0x128909ACu, 0x25121358u, 0x4A2426B0u,
    0x94484D60u, 0x2D7CEC31u, 0x5AF9D862u, 0xB5F3B0C4u, 0x6E0B1779u, 0xDC162EF2u, 0xBDC02B15u,
    0x7E6C20DBu, 0xFCD841B6u, 0xFC5CF59Du, 0xFD559DCBu, 0xFF474D67u, 0xFB62EC3Fu, 0xF329AE8Fu,
    0xE3BF2BEFu, 0xC292212Fu, 0x80C834AFu, 0x047C1FAFu, 0x08F83F5Eu, 0x11F07EBCu, 0x23E0FD78u,
    0x47C1FAF0u, 0x8F83F5E0u, 0x1AEB9D31u, 0x35D73A62u};

static uint32_t fsdpi_crc_after_lane(uint32_t crc) {
    uint32_t moved = 0;
    for (int i = 0; i < 32; i++) moved ^= fsdpi_crc_lane[i] & (0u - (crc >> i & 1));
    return moved;
}
// Computes a CRC with the processor's instruction. Each instruction needs the result of the one
// before it, and a core can run three at once. So three lanes of bytes, adjacent in memory, are
// read in parallel.
FSDPI_CRC_TARGET static uint32_t fsdpi_crc_by_instruction(uint32_t crc, const unsigned char *p,
                                                          int64_t n) {
    for (; n >= 3 * FSDPI_CRC_LANE; n -= 3 * FSDPI_CRC_LANE, p += 3 * FSDPI_CRC_LANE) {
        uint32_t second = 0, third = 0;
        for (int i = 0; i < FSDPI_CRC_LANE; i += 8) {
            crc = fsdpi_crc_8(crc, p + i);
            second = fsdpi_crc_8(second, p + FSDPI_CRC_LANE + i);
            third = fsdpi_crc_8(third, p + 2 * FSDPI_CRC_LANE + i);
        }
        crc = fsdpi_crc_after_lane(fsdpi_crc_after_lane(crc) ^ second) ^ third;
    }
    for (; n >= 8; n -= 8, p += 8) crc = fsdpi_crc_8(crc, p);
    for (; n > 0; n--) crc = fsdpi_crc_1(crc, p++);
    return crc;
}
#endif

FSDP_API uint32_t fsdp_crc32c(uint32_t crc, const void *data, int64_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    return ~(fsdpi_crc_has_instruction() ? fsdpi_crc_by_instruction(~crc, p, nbytes)
                                         : fsdpi_crc_by_table(~crc, p, nbytes));
}

#endif // FSDPI_SAFETENSORS_CRC_H
