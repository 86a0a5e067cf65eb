// Every codec, for the two places that know them all: the kernels and pack.cc.
#pragma once

#include "quant/bf16-inl.h"
#include "quant/fp8-inl.h"
#include "quant/int4-inl.h"
#include "quant/int8-inl.h"
#include "quant/k4-inl.h"
#include "quant/mxfp4-inl.h"
