// SPDX-License-Identifier: Apache-2.0
// Carries the precompiled header that the test programs share; it has no code of its own.
