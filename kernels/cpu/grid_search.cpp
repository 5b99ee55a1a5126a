// The grids of 4-bit groups: scale and minimum in float16 that lose least of what the inputs weigh.
//
// Runs in the compiler, not in an engine. Only operations that IEEE 754 rounds correctly, in one order, without
// contraction: every machine finds the same grids. tests/codegen/test_grid_search.py has the same in numpy.

#include <stddef.h>
#include <stdint.h>

namespace {

constexpr int GROUP = 32, LANES = 8, PARTS = GROUP / LANES;
constexpr float LEVELS = 15, F16_MAX = 65504;
constexpr int STEPS = 4, REFITS = 2;
constexpr float LARGEST_SHRINK = 0.15f;

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));

struct Group {
    Vector of[PARTS];
};

struct Grid {
    float scale, minimum;
};

Group load(const float *from) {
    Group g;
    __builtin_memcpy(&g, from, sizeof g);
    return g;
}

float sum(Vector v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

/// Round to nearest even, of 0 <= v < 2^22.
Vector round(Vector v) { return (v + 12582912.0f) - 12582912.0f; }

float to_f16(float x) { return static_cast<float>(static_cast<_Float16>(x)); }

/// The nearest codes on a grid of scale > 0, and their weighted squared error.
float nearest(const Group &w, const Group &weight, Grid grid, Group &codes) {
    const float inverse = 1.0f / grid.scale;
    const Vector zero = {}, top = zero + LEVELS;
    Vector error = {};
    for (int i = 0; i < PARTS; i++) {
        Vector u = (w.of[i] - grid.minimum) * inverse;
        u = u > zero ? u : zero;
        u = round(u < top ? u : top);
        codes.of[i] = u;
        const Vector d = u * grid.scale + grid.minimum - w.of[i];
        error += weight.of[i] * d * d;
    }
    return sum(error);
}

/// Weighted least squares of w = scale * codes + minimum. False where the codes are all the same.
bool refit(const Group &w, const Group &weight, float total, float mean, const Group &codes, Grid &grid) {
    Vector su = {}, suu = {}, suw = {};
    for (int i = 0; i < PARTS; i++) {
        const Vector hu = weight.of[i] * codes.of[i];
        su += hu;
        suu += hu * codes.of[i];
        suw += hu * w.of[i];
    }
    const float u = sum(su), uu = sum(suu), uw = sum(suw);
    const float determinant = total * uu - u * u;
    if (!(determinant > 1e-6f * total * uu)) return false;
    grid.scale = (total * uw - u * mean) / determinant;
    grid.minimum = (mean - grid.scale * u) / total;
    return true;
}

bool fits_f16(Grid grid) { return grid.scale > 0 && grid.scale <= F16_MAX && __builtin_fabsf(grid.minimum) <= F16_MAX; }

/// The best grid found, which begins as `grid`: ranges shrunk from both ends, each refitted to the codes it gives.
Grid search(const Group &w, const Group &weight, Grid grid) {
    Group codes;
    float lowest = w.of[0][0], highest = lowest;
    Vector total = {}, moment = {};
    for (int i = 0; i < PARTS; i++) {
        for (int j = 0; j < LANES; j++) {
            lowest = w.of[i][j] < lowest ? w.of[i][j] : lowest;
            highest = w.of[i][j] > highest ? w.of[i][j] : highest;
        }
        total += weight.of[i];
        moment += weight.of[i] * w.of[i];
    }
    const float all = sum(total), mean = sum(moment), span = highest - lowest;
    float least = grid.scale > 0 ? nearest(w, weight, grid, codes) : __builtin_inff();
    for (int p = 0; p <= STEPS; p++) {
        for (int q = 0; q <= STEPS; q++) {
            const float from = lowest + span * (LARGEST_SHRINK * p / STEPS);
            const float to = highest - span * (LARGEST_SHRINK * q / STEPS);
            Grid trial = {(to - from) / LEVELS, from};
            if (!fits_f16(trial)) continue;
            nearest(w, weight, trial, codes);
            for (int i = 0; i < REFITS; i++) {
                if (!refit(w, weight, all, mean, codes, trial)) break;
                const Grid stored = {to_f16(trial.scale), to_f16(trial.minimum)};
                if (!fits_f16(trial) || !fits_f16(stored)) break;
                const float error = nearest(w, weight, stored, codes);
                if (error < least) least = error, grid = stored;
            }
        }
    }
    return grid;
}

}  // namespace

/// w [n][32]; weight [m][32], of which group i has number which[i]; scale, minimum [n]: a grid to begin with, in and
/// out, each exactly a float16; codes [n][32] of the grid that comes out.
extern "C" __attribute__((visibility("default"))) void llmc_search_grids(
    const float *w, const float *weight, const int32_t *which, ptrdiff_t n, float *scale, float *minimum,
    uint8_t *codes) {
    for (ptrdiff_t i = 0; i < n; i++) {
        const Group values = load(w + i * GROUP), weights = load(weight + which[i] * static_cast<ptrdiff_t>(GROUP));
        const Grid grid = search(values, weights, {scale[i], minimum[i]});
        scale[i] = grid.scale, minimum[i] = grid.minimum;
        Group best = {};
        if (grid.scale > 0) nearest(values, weights, grid, best);
        for (int j = 0; j < GROUP; j++) codes[i * GROUP + j] = static_cast<uint8_t>(best.of[j / LANES][j % LANES]);
    }
}
