// Everything that a generated unit includes.
#pragma once
#include "abi.h"
#include "attention.h"
#include "elementwise.h"
#include "kv.h"
#include "linear.h"
#include "mat.h"
#include "norm.h"
#include "pool.h"
#include "quantize.h"
#include "rope.h"
#include "sampling.h"
#include "weights.h"
