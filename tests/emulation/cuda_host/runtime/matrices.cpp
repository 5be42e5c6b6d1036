/* ldmatrix and mma, lane by lane as the PTX manual lays the fragments out. */
#include "block.h"
#include "../include/host_floats.h"

namespace pagedkern_host {
namespace {

constexpr unsigned ALL = 0xffffffffu;


void ldmatrix(unsigned *r, const void *row, int matrices, bool transposed, const char *name) {
  Request request{Collective::LDMATRIX, ALL, {name, 0}, row, r, 0, matrices * 2 + transposed};
  collective(request);
}

enum Type { F16, BF16, TF32 };
struct Multiply {
  float *d;
  const unsigned *a, *b;
  const float *c;
};

void mma(float *d, const unsigned *a, const unsigned *b, const float *c, Type type, int k, const char *name) {
  Multiply operands{d, a, b, c};
  Request request{Collective::MMA, ALL, {name, 0}, &operands, nullptr, 0, k * 4 + type};
  collective(request);
}

float narrow(unsigned word, int half, Type type) {
  unsigned short h = (unsigned short)(word >> (16 * half));
  return type == F16 ? float_of_half(h) : float_of_bfloat16(h);
}

} // namespace

void perform_ldmatrix(Request *const lanes[32]) {
  int matrices = lanes[0]->argument / 2;
  bool transposed = lanes[0]->argument % 2;
  unsigned short tile[4][8][8];
  for (int l = 0; l < 8 * matrices; ++l) {
    if (uintptr_t(lanes[l]->in) % 16) fail("ldmatrix: the row of lane %d, %p, is not aligned to 16 bytes", l, lanes[l]->in);
    touch_as((current->id & ~31u) + unsigned(l), lanes[l]->in, 16, Access::READ);
    memcpy(tile[l / 8][l % 8], lanes[l]->in, 16);
  }
  for (int l = 0; l < 32; ++l) {
    if (lanes[l]->argument != lanes[0]->argument) fail("ldmatrix: lanes 0 and %d execute different variants", l);
    for (int m = 0; m < matrices; ++m) {
      int i = l / 4, j = 2 * (l % 4);
      unsigned low = transposed ? tile[m][j][i] : tile[m][i][j];
      unsigned high = transposed ? tile[m][j + 1][i] : tile[m][i][j + 1];
      static_cast<unsigned *>(lanes[l]->out)[m] = high << 16 | low;
    }
  }
}

void perform_mma(Request *const lanes[32]) {
  int K = lanes[0]->argument / 4;
  Type type = Type(lanes[0]->argument % 4);
  float a[16][16], b[16][8], d[16][8];
  for (int l = 0; l < 32; ++l) {
    if (lanes[l]->argument != lanes[0]->argument) fail("mma: lanes 0 and %d execute different variants", l);
    const Multiply &m = *static_cast<const Multiply *>(lanes[l]->in);
    int g = l / 4, t = l % 4;
    if (type == TF32) {
      for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][t + 4 * (i / 2)] = bits<float>(m.a[i] & 0xffffe000u);
      for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = bits<float>(m.b[i] & 0xffffe000u);
    } else {
      for (int i = 0; i < K / 4; ++i)
        for (int h = 0; h < 2; ++h) a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + h] = narrow(m.a[i], h, type);
      for (int i = 0; i < K / 8; ++i)
        for (int h = 0; h < 2; ++h) b[2 * t + 8 * i + h][g] = narrow(m.b[i], h, type);
    }
    for (int i = 0; i < 4; ++i) d[g + 8 * (i / 2)][2 * t + i % 2] = m.c[i];
  }
  for (int k = 0; k < K; ++k)
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
  for (int l = 0; l < 32; ++l) {
    const Multiply &m = *static_cast<const Multiply *>(lanes[l]->in);
    for (int i = 0; i < 4; ++i) m.d[i] = d[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
  }
}

#define PAGEDKERN_LDMATRIX_(name, matrices, transposed) \
  void name(unsigned *r, const void *row) { ldmatrix(r, row, matrices, transposed, #name); }
PAGEDKERN_LDMATRIX_(ldmatrix_x1, 1, false)
PAGEDKERN_LDMATRIX_(ldmatrix_x2, 2, false)
PAGEDKERN_LDMATRIX_(ldmatrix_x4, 4, false)
PAGEDKERN_LDMATRIX_(ldmatrix_x1_trans, 1, true)
PAGEDKERN_LDMATRIX_(ldmatrix_x2_trans, 2, true)
PAGEDKERN_LDMATRIX_(ldmatrix_x4_trans, 4, true)

#define PAGEDKERN_MMA_(name, type, k) \
  void name(float *d, const unsigned *a, const unsigned *b, const float *c) { mma(d, a, b, c, type, k, #name); }
PAGEDKERN_MMA_(mma_m16n8k16_f16, F16, 16)
PAGEDKERN_MMA_(mma_m16n8k16_bf16, BF16, 16)
PAGEDKERN_MMA_(mma_m16n8k8_f16, F16, 8)
PAGEDKERN_MMA_(mma_m16n8k8_bf16, BF16, 8)
PAGEDKERN_MMA_(mma_m16n8k8_tf32, TF32, 8)

} // namespace pagedkern_host
