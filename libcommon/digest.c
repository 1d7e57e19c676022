/* SPDX-License-Identifier: Apache-2.0 */
/*
 * digest: XXH3-128 from libxxhash; SHA-256 (FIPS 180-4) here, for one short text a run: clarity
 * before speed.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <string.h>
#include <xxhash.h>
#ifdef HAVE_XXH_DISPATCH
#include <xxh_x86dispatch.h>	/* gives the calls below their run-time forms */
#endif

#include "digest.h"
#include "err.h"

static void hex_of(char *hex, const unsigned char *bytes, size_t n)
{
	static const char digit[] = "0123456789abcdef";
	size_t i;

	for (i = 0; i < n; i++) {
		hex[2 * i] = digit[bytes[i] >> 4];
		hex[2 * i + 1] = digit[bytes[i] & 15];
	}
	hex[2 * n] = '\0';
}

static void hex_of_xxh(char hex[DIGEST_HEX], XXH128_hash_t h)
{
	XXH128_canonical_t c;

	XXH128_canonicalFromHash(&c, h);
	hex_of(hex, c.digest, sizeof c.digest);
}

void digest_xxh3(char hex[DIGEST_HEX], const void *buf, size_t n)
{
	hex_of_xxh(hex, XXH3_128bits(buf, n));
}

struct digest *digest_new(struct err *e)
{
	/* the library aligns its state itself; the handle is the state under our name */
	XXH3_state_t *s = XXH3_createState();

	if (!s) {
		err_fail(e, "out of memory: cannot make a hash state");
		return NULL;
	}
	XXH3_128bits_reset(s);
	return (struct digest *)s;
}

static XXH3_state_t *state_of(struct digest *d)
{
	return (XXH3_state_t *)d;
}

void digest_reset(struct digest *d)
{
	XXH3_128bits_reset(state_of(d));
}

void digest_update(struct digest *d, const void *buf, size_t n)
{
	if (n)
		XXH3_128bits_update(state_of(d), buf, n);
}

void digest_hex(const struct digest *d, char hex[DIGEST_HEX])
{
	hex_of_xxh(hex, XXH3_128bits_digest((const XXH3_state_t *)d));
}

void digest_free(struct digest *d)
{
	if (d)
		XXH3_freeState(state_of(d));
}

/* The first 32 bits of the fractions of the cube roots of the first 64 primes. */
static const uint32_t sha_k[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
	0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
	0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
	0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
	0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
	0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
	0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
	0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
	0xc67178f2,
};

/* The same of the square roots of the first 8. */
static const uint32_t sha_h[8] = {
	0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
	0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static uint32_t rotr(uint32_t x, int n)
{
	return x >> n | x << (32 - n);
}

static void sha_block(uint32_t h[8], const unsigned char *p)
{
	uint32_t w[64], v[8];
	int i;

	for (i = 0; i < 16; i++)
		w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
		       (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
	for (; i < 64; i++) {
		uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
		uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10;

		w[i] = w[i - 16] + s0 + w[i - 7] + s1;
	}
	memcpy(v, h, sizeof v);
	for (i = 0; i < 64; i++) {
		uint32_t s1 = rotr(v[4], 6) ^ rotr(v[4], 11) ^ rotr(v[4], 25);
		uint32_t s0 = rotr(v[0], 2) ^ rotr(v[0], 13) ^ rotr(v[0], 22);
		uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
		uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
		uint32_t t = v[7] + s1 + choice + sha_k[i] + w[i];

		memmove(v + 1, v, 7 * sizeof v[0]);
		v[4] += t;
		v[0] = t + s0 + majority;
	}
	for (i = 0; i < 8; i++)
		h[i] += v[i];
}

void digest_sha256(char hex[SHA256_HEX], const void *buf, size_t n)
{
	const unsigned char *p = buf;
	unsigned char last[128] = { 0 }, out[32];
	size_t rest = n % 64, len = rest < 56 ? 64 : 128;
	uint32_t h[8];
	int i;

	memcpy(h, sha_h, sizeof h);
	for (; n - (size_t)(p - (const unsigned char *)buf) >= 64; p += 64)
		sha_block(h, p);
	if (rest)
		memcpy(last, p, rest);
	last[rest] = 0x80;
	for (i = 0; i < 8; i++)
		last[len - 1 - (size_t)i] = (unsigned char)((uint64_t)n * 8 >> 8 * i);
	sha_block(h, last);
	if (len == 128)
		sha_block(h, last + 64);
	for (i = 0; i < 32; i++)
		out[i] = (unsigned char)(h[i / 4] >> (24 - 8 * (i % 4)));
	hex_of(hex, out, sizeof out);
}
