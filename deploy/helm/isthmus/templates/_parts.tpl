{{- define "isthmus.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "isthmus.image" -}}
{{- $image := index .root.Values.images .role -}}
image: {{ printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{- define "isthmus.labels" -}}
app.kubernetes.io/name: isthmus
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "isthmus.joining" -}}
{{- if not (or .join .root.Values.server.enabled) -}}
{{- fail (printf "%s.join is empty, and this release has no server: name the one to join" .role) -}}
{{- end -}}
{{- default (printf "%s-server.%s.svc:9401" (include "isthmus.name" .root) .root.Release.Namespace) .join -}}
{{- end -}}

{{- define "isthmus.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "isthmus.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}
