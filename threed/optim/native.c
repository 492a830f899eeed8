/* Two loops over host memory; native.py loads them.
 *
 * AdamW in one pass: 16-bit gradients are read, clipped and used, and a 16-bit copy of the weights written, while what they meet
 * is in the cache. And the checksum of a checkpoint's tensors (checkpoint/proof.py).
 *
 * Compiled without contraction of a * b + c: every processor, compiler and number of threads gives the same bits. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum kind { NONE, FP32, BF16, FP16 };

struct numbers {
    float scale;                  /* of gradients */
    float beta1, rest1;           /* rest1 = 1 - beta1 */
    float beta2, rest2;
    float keep;                   /* 1 - lr * weight_decay */
    float size;                   /* lr / (1 - beta1^t) */
    float root;                   /* 1 / sqrt(1 - beta2^t) */
    float eps;
};

struct range {
    float *weight, *exp_avg, *exp_avg_sq;
    const void *grad;
    void *copy;
    enum kind grad_kind, copy_kind;
};

/* Elements of which a 16-bit gradient is widened at a time: few enough for the first cache. */
#define BLOCK 1024
/* Elements that a thread takes at a time: worth waking it, and so few that all threads end together. */
#define PIECE 131072

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Narrowing rounds to nearest, ties to even. All of it is arithmetic that compilers make vectors of. */

static inline float from_bf16(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

static inline uint16_t to_bf16(float value)
{
    uint32_t bits = bits_of(value);
    uint16_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return value == value ? rounded : 0x7FC0;
}

static inline float from_fp16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = (uint32_t)(bits & 0x7FFF) << 13;
    uint32_t finite = bits_of(float_of(rest) * 0x1p112f); /* the exponents' biases differ by 112; exact */
    return float_of(sign | ((bits & 0x7C00) == 0x7C00 ? rest | 0x7F800000 : finite));
}

static inline uint16_t to_fp16(float value)
{
    uint32_t bits = bits_of(value), rest = bits & 0x7FFFFFFF;
    uint32_t small = bits_of(float_of(rest) + 0.5f) - 0x3F000000; /* below 2^-14: in units of 2^-24, as the sum rounds */
    uint32_t normal = (rest + 0xFFF + ((rest >> 13) & 1) - (112u << 23)) >> 13;
    uint32_t narrow = rest < 0x38800000 ? small : rest < 0x477FF000 ? normal : rest <= 0x7F800000 ? 0x7C00 : 0x7E00;
    return ((bits >> 16) & 0x8000) | narrow;
}

FOR_EACH_PROCESSOR
static void step(struct range r, int64_t begin, int64_t end, struct numbers s)
{
    float *restrict exp_avg = r.exp_avg, *restrict exp_avg_sq = r.exp_avg_sq;
    float wide[BLOCK];
    for (int64_t start = begin; start < end; start += BLOCK) {
        int64_t n = end - start < BLOCK ? end - start : BLOCK;
        float *restrict weight = r.weight + start;
        const float *grad = wide;
        if (r.grad_kind == FP32)
            grad = (const float *)r.grad + start;
        else if (r.grad_kind == BF16)
            for (int64_t i = 0; i < n; i++)
                wide[i] = from_bf16(((const uint16_t *)r.grad)[start + i]);
        else
            for (int64_t i = 0; i < n; i++)
                wide[i] = from_fp16(((const uint16_t *)r.grad)[start + i]);

        for (int64_t i = 0; i < n; i++) {
            float g = grad[i] * s.scale;
            float m = exp_avg[start + i] * s.beta1 + g * s.rest1;
            float v = exp_avg_sq[start + i] * s.beta2 + g * g * s.rest2;
            exp_avg[start + i] = m;
            exp_avg_sq[start + i] = v;
            weight[i] = weight[i] * s.keep - s.size * m / (sqrtf(v) * s.root + s.eps);
        }

        if (r.copy_kind == FP32)
            memcpy((float *)r.copy + start, weight, n * sizeof(float));
        else if (r.copy_kind == BF16)
            for (int64_t i = 0; i < n; i++)
                ((uint16_t *)r.copy)[start + i] = to_bf16(weight[i]);
        else if (r.copy_kind == FP16)
            for (int64_t i = 0; i < n; i++)
                ((uint16_t *)r.copy)[start + i] = to_fp16(weight[i]);
    }
}

int threed_version(void)
{
    return 2; /* VERSION in native.py, raised with it */
}

void threed_adamw(const struct range *range, int64_t numel, int threads, const struct numbers *numbers)
{
    int64_t pieces = (numel + PIECE - 1) / PIECE;
    if (threads > pieces)
        threads = (int)pieces;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t piece = 0; piece < pieces; piece++)
        step(*range, piece * PIECE, piece + 1 < pieces ? (piece + 1) * PIECE : numel, *numbers);
}

/* splitmix64's finalizer, as data/samples.mix. Odd, so that no single wrong element leaves a sum as it was. */
static inline uint64_t weight_of(uint64_t index)
{
    uint64_t z = index + 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (z ^ (z >> 31)) | 1;
}

FOR_EACH_PROCESSOR
static uint64_t sum_row(const uint32_t *bits, int64_t columns, uint64_t first)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < columns; i++)
        sum += (bits[i] + (uint64_t)1) * weight_of(first + i);
    return sum;
}

/* Of rows x columns elements, one row after the other in memory, of which element (r, c) has index first + r * stride + c. */
uint64_t threed_sum(const uint32_t *bits, int64_t rows, int64_t columns, uint64_t first, uint64_t stride)
{
    uint64_t sum = 0;
    for (int64_t row = 0; row < rows; row++)
        sum += sum_row(bits + row * columns, columns, first + row * stride);
    return sum;
}
